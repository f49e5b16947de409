"""A program that ends with everything it started: `python -P -m astraflow_kit.family PARENT_PID PROGRAM ARGUMENTS…`.

Invariant: whoever is killed first, even by SIGKILL (the process that asked for it, the program, one of its helpers that
made itself a daemon), nothing of the program is left: this process adopts its orphans and kills them. It ends as the
program did. SIGTERM is passed on to the program alone, SIGINT kills all. Imports nothing but the standard library: it
stands beside every engine for as long as that runs. PARENT_PID 0 is the first process of a container, which has no
parent to end with: it reaps what its program leaves behind, as the kernel asks of that process.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from astraflow_kit.parent import die_with_parent, dying_with_us, python

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_POLL_S = 0.01
_TAKEN = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def ending_with_us(*command: str) -> tuple[str, ...]:
    """The command line of a child that ends, with all of its own, when this process does; off Linux without its own.

    Start it from a thread that lives as long as the process. Its pid is not the program's.
    """
    if not sys.platform.startswith("linux"):
        return dying_with_us(*command)
    return python(__name__, str(os.getpid()), *command)


def _guard(parent_pid: int, command: list[str]) -> NoReturn:
    libc = ctypes.CDLL(None, use_errno=True)
    # The first process of a container must not watch the runtime outside, which may change its threads.
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) or (
        parent_pid and libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    ):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER or PR_SET_PDEATHSIG) failed")
    # Taken one by one below: a handler's turn may come after the call that was to be interrupted has begun to wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    program = os.fork()
    if not program:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)
        die_with_parent(os.getppid())
        os.execvp(command[0], command)
    if parent_pid and os.getppid() != parent_pid:
        _kill([program])
    while (status := _status_of(program)) is None:
        match signal.sigwait(_TAKEN):
            case signal.SIGTERM:
                os.kill(program, signal.SIGTERM)
            case signal.SIGINT:
                _kill(_descendants())
    _end_orphans()
    _end_as(status)


def _status_of(program: int) -> int | None:
    """How the program ended; None while it runs. Reaps what else has ended."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, program):
            return status if ended else None


def _end_orphans() -> None:
    """Kill until nothing is left; who holds the group may end us before."""
    while True:
        _kill(_descendants())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_KILL_POLL_S)


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # the first process of a container, which its own signals do not end
    os._exit(os.waitstatus_to_exitcode(status))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants() -> list[int]:
    """Our children, theirs, and so on, by the table of processes."""
    parents = dict(filter(None, map(_pid_and_parent, Path("/proc").glob("[0-9]*/stat"))))
    found, ours = list[int](), {os.getpid()}
    while new := [pid for pid, parent in parents.items() if parent in ours and pid not in ours]:
        found += new
        ours.update(new)
    return found


def _pid_and_parent(stat: Path) -> tuple[int, int] | None:
    try:
        # The name in parentheses may hold anything, spaces and parentheses too.
        rest = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None  # it ended meanwhile
    return int(stat.parent.name), int(rest[1])


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2:])
