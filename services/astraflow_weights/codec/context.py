"""Classes of bfloat16 elements by the exponent of their old value, which the receiver of a delta has.

Invariant: classes depend on the base only, so both sides agree on them without a message. How likely a weight
moves, and how far, depends on its size: counted inside a class, gaps are shorter and steps more alike.
`tile_delta` calls it; the kernel does the work where there is one.

Class of a value: its exponent (8 bits) less `first_exponent`, clamped to 0 … 15.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow_weights.codec import kernel
from astraflow_weights.codec.kernel import NUM_CLASSES, U16, U32
from astraflow_weights.codec.rice import Changes
from astraflow_weights.errors import CorruptPart

# Every 37th element is enough to see where the exponents lie; 37 divides no usual row length.
_SAMPLE_STRIDE = 37
_TOP_SHARE = 0.99


def first_exponent(base: U16) -> int:
    """The exponent of class 0, such that the top classes hold the largest usual exponents."""
    exponents = (base[::_SAMPLE_STRIDE] >> 7) & 0xFF
    cumulative = np.cumsum(np.bincount(exponents, minlength=256))
    top = int(np.searchsorted(cumulative, _TOP_SHARE * len(exponents)))
    return max(0, top - (NUM_CLASSES - 2))


def rank(base: U16, target: U16, *, first: int) -> Changes:
    """What changed from `base` to `target`, as ranks inside classes."""
    compiled = kernel.active()
    if compiled is not None:
        ranks, steps, counts, populations = compiled.rank(base, target, first_exponent=first)
        return Changes(ranks=ranks, steps=steps, counts=counts, populations=populations)
    classes = _classes(base, first=first)
    positions = np.flatnonzero(base != target)
    ranks_by_class, steps_by_class = [], []
    for number in range(NUM_CLASSES):
        chosen = positions[classes[positions] == number]
        if len(chosen):
            ranks_by_class.append(np.searchsorted(np.flatnonzero(classes == number), chosen))
            steps_by_class.append(target[chosen] - base[chosen])
    return Changes(
        ranks=_joined(ranks_by_class, np.uint32),
        steps=_joined(steps_by_class, np.uint16),
        counts=np.bincount(classes[positions], minlength=NUM_CLASSES).astype(np.uint32),
        populations=np.bincount(classes, minlength=NUM_CLASSES).astype(np.uint32),
    )


def locate(base: U16, changes: Changes, *, first: int) -> tuple[U32, U16]:
    """Positions of ranks inside classes, each once, and their steps. Raises CorruptPart when a class has fewer
    elements.
    """
    compiled = kernel.active()
    if compiled is not None:
        located = compiled.locate(
            base, first_exponent=first, counts=changes.counts, ranks=changes.ranks, steps=changes.steps
        )
        if located is None:
            raise CorruptPart("it changes elements that its class does not have in this base")
        return located
    classes = _classes(base, first=first)
    positions, start = [], 0
    for number, count in enumerate(changes.counts.tolist()):
        members = np.flatnonzero(classes == number) if count else np.empty(0, np.int64)
        ranks = changes.ranks[start : start + count]
        if count and ranks[-1] >= len(members):
            raise CorruptPart("it changes elements that its class does not have in this base")
        positions.append(members[ranks])
        start += count
    return _joined(positions, np.uint32), changes.steps


def _classes(base: U16, *, first: int) -> npt.NDArray[np.uint8]:
    exponents = ((base >> 7) & 0xFF).astype(np.int16)
    return np.clip(exponents - first, 0, NUM_CLASSES - 1).astype(np.uint8)


def _joined(arrays: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
