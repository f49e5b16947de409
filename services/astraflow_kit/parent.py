"""Dying with the parent process, whatever ends it.

Imports nothing but the standard library, so that a launcher can arm it in a small process which then
becomes another program (the setting survives `exec`). Called by `lifecycle.begin` and by the launcher.
"""

import ctypes
import os
import signal
import sys

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
