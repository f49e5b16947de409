"""Options of the C library's allocator, for processes that live long.

It gives threads that allocate at the same time arenas of their own, up to eight for each core, and what one arena has
free no other one uses: a process with many short-lived threads grows for as long as each of them comes upon arenas that
others have filled with holes. Called once when a process starts.
"""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
LARGEST_REUSED_BYTES = 32 * 2**20
"""The largest mmap threshold that glibc accepts; blocks above it are mapped and unmapped one by one."""
# One for the main thread, one for all others: Python's lock lets few of them allocate at once.
_ARENAS = 2


def share_arenas() -> bool:
    """Let the threads of this process share arenas. Returns whether the allocator agreed."""
    return set_options((ARENA_MAX, _ARENAS))


def set_options(*options: tuple[int, int]) -> bool:
    """Set options (number, value); False where one is declined, or it is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in options)
