"""Keeps freed memory inside the process, because a training step frees and asks for the same activations
again.

The C library gives large blocks back to the system at once, and fresh pages are then zeroed and mapped again
at each step: up to a third of a CPU step goes there, more on virtual machines. Called once when a trainer
process starts. What is kept is bounded by the peak of each arena, of which `allocator.share_arenas` leaves two.
"""

from astraflow_kit.allocator import LARGEST_REUSED_BYTES, MMAP_THRESHOLD, TRIM_THRESHOLD, set_options

_KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the allocator to reuse blocks of up to 32 MiB. Returns whether it agreed; False where it is not
    glibc.
    """
    return set_options((MMAP_THRESHOLD, LARGEST_REUSED_BYTES), (TRIM_THRESHOLD, _KEPT_BYTES))
