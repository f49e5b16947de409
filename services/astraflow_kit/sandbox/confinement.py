"""What a process may do before it runs untrusted code: close, hide, limit, and refuse system calls.

Invariant: nothing here can be undone by the code that runs afterwards. Standard library only: it runs within sandboxes.
"""

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Mapping

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 4, 38, 22
_MODE_FILTER = 2
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_CLONE_THREAD = 0x10000
# Audit number of the machine; its calls named clone and shmget; what is refused to all: memory that no limit counts,
# and keys, which outlive a sandbox; what is refused to programs beside: starting processes, looking into others, and
# the kernel's less travelled roads.
_MACHINES = {
    "x86_64": (
        *(0xC000003E, 56, 29, "319 447 68 64 321 425 248 249 250"),
        "57 58 59 322 101 310 311 29 165 166 272 308 161 155 298 323 426 427 428 429 430 431 432 62 200 234 "
        "424 434 438",
    ),
    "aarch64": (
        *(0xC00000B7, 220, 194, "279 447 186 190 280 425 217 218 219"),
        "221 281 117 270 271 194 40 39 97 268 51 41 241 282 426 427 428 429 430 431 432 129 130 131 424 434 "
        "438",
    ),
}
_PAGE = 4096
_CLONE3 = 435
_CLOSE_RANGE = 436
_LAST_DESCRIPTOR = 2**20
NICE = 10
"""Of what a policy runs: it takes no more of the processor than is left over."""
_X32_BIT = 0x40000000


def hide_memory() -> None:
    """Keep other processes of the sandbox from reading or tracing this one."""
    _prctl(_PR_SET_DUMPABLE, 0)


def close_descriptors(first: int) -> None:
    """Close every one from `first` on, whatever the limit was when it was opened."""
    if ctypes.CDLL(None).syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(2**32 - 1), 0) != 0:
        os.closerange(first, _LAST_DESCRIPTOR)  # kernels before 5.9


def limit_resources(limits: Mapping[str, int]) -> None:
    """Set hard limits, by the names of `resource`; nobody in a sandbox may raise them."""
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))


def filter_calls(machine: str, *, may_start: bool) -> None:
    """Refuse what `_MACHINES` lists to this process and all that it starts; new processes, too, unless it `may_start`
    some, as a shell does. Raises OSError.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    program = b"".join(struct.pack("HBBI", *each) for each in _instructions(machine, may_start=may_start))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header))


def _instructions(machine: str, *, may_start: bool) -> list[tuple[int, int, int, int]]:
    """A classic BPF program over {number, machine, …, arguments}."""
    audit, clone, shmget, of_all, of_programs = _MACHINES[machine]
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_ANY_BIT, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _EPERM),
    ]
    for number in map(int, of_all.split()):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ENOSYS)]  # then callers do without
    if may_start:
        return [
            *code,
            (_EQUAL, 0, 5, shmget),
            (_LOAD, 0, 0, 28),  # the halves of its size: databases have a page, to find each other
            (_GREATER, 2, 0, 0),
            (_LOAD, 0, 0, 24),
            (_GREATER, 0, 1, _PAGE),
            (_RETURN, 0, 0, _ENOSYS),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for number in map(int, of_programs.split()):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    return [
        *code,
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),  # the C library falls back to clone, whose flags can be looked at
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _prctl(option: int, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    given = [*arguments, *[0] * (4 - len(arguments))]
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in given]
    if library.prctl(option, *values) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed on {sys.platform}")
