"""Dying with the parent process, whatever ends it; `python -P -m astraflow_kit.parent PARENT_PID PROGRAM ARGUMENTS…`
becomes PROGRAM and dies with the parent.

Imports nothing but the standard library: it runs in a small process before every engine and every Redis, and the
kernel's setting survives `exec`. `lifecycle.begin` arms our own daemons, whoever starts another program uses
`dying_with_us`.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies, even by SIGKILL. Does nothing off Linux.

    `parent_pid` is our parent's pid as it told us: if it died before this call, the kernel would watch
    whoever inherited us, so we end at once. The parent's *thread* that started us must outlive us.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a module in this interpreter, which imports nothing of the folder that it is started in."""
    return (sys.executable, "-P", "-m", module, *arguments)


def dying_with_us(*command: str) -> tuple[str, ...]:
    """The command line of a child that ends when this process does; it keeps the pid it was started under.

    Start it from a thread that lives as long as the process.
    """
    return python(__name__, str(os.getpid()), *command)


def _become(parent_pid: str, program: str, *arguments: str) -> NoReturn:
    die_with_parent(int(parent_pid))
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    _become(*sys.argv[1:])
