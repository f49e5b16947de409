"""Memory of a process tree as the kernel accounts it: proportional set size (PSS), shared pages divided by
their users.
"""

import os
from pathlib import Path

import psutil


def tree_pss_bytes(root_pid: int) -> int:
    """Return the PSS in bytes of `root_pid` and all its descendants; resident size where PSS is not
    readable.
    """
    try:
        root = psutil.Process(root_pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_pss_bytes(process) for process in processes)


class PeakMemory:
    """The largest PSS seen of this process and its descendants."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def sample(self) -> int:
        """Measure now and return the peak so far, in bytes."""
        self.peak_bytes = max(self.peak_bytes, tree_pss_bytes(os.getpid()))
        return self.peak_bytes


def _pss_bytes(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return int(process.memory_info().rss)
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return 0
    except PermissionError:
        return int(process.memory_info().rss)
