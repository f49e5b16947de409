"""Keeps freed memory inside the process, because a training step frees and asks for the same activations
again.

The C library gives large blocks back to the system at once, and fresh pages are then zeroed and mapped again
at each step: up to a third of a CPU step goes there, more on virtual machines. Called once when a trainer
process starts.
"""

import ctypes
import sys

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# The largest mmap threshold that glibc accepts; blocks above it are still mapped and unmapped one by one.
_LARGEST_REUSED_BYTES = 32 * 2**20
_KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the allocator to reuse blocks of up to 32 MiB. Returns whether it agreed; False where it is not
    glibc.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_MMAP_THRESHOLD, _LARGEST_REUSED_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES))
    return all(mallopt(option, value) == 1 for option, value in options)
