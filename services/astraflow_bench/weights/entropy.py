"""How few bytes a delta can take: entropies of which weights changed and by how much.

Invariant: bits of an ideal code that knows the frequencies: of the mask (which elements changed) as independent
draws, and of the steps; once over the whole model, and once inside classes of equal exponent of the old value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
_NUM_EXPONENTS, _NUM_STEPS = 256, 2**16


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Counts, and bits of the whole delta."""

    num_elements: int
    num_changed: int
    one_unit: int
    """Changes by one unit in the last place."""
    plain_bits: float
    context_bits: float
    """As `plain_bits`, given the exponents of the old values."""

    @property
    def density(self) -> float:
        """Changed share."""
        return self.num_changed / self.num_elements


def bounds(base: Mapping[str, Bits], target: Mapping[str, Bits]) -> Bounds:
    """Bounds on the bytes between two versions that differ somewhere."""
    population = np.zeros(_NUM_EXPONENTS, np.int64)
    # Steps of each exponent: one table of 256 x 65536 counters, whatever the model's size.
    steps = np.zeros((_NUM_EXPONENTS, _NUM_STEPS), np.int64)
    for name, old in base.items():
        exponents = ((old >> 7) & 0xFF).reshape(-1)
        population += np.bincount(exponents, minlength=_NUM_EXPONENTS)
        difference = (target[name] - old).reshape(-1)
        changed = np.flatnonzero(difference)
        np.add.at(steps, (exponents[changed], difference[changed]), 1)
    changes = steps.sum(axis=1)
    context = _mask_bits(population, changes) + sum(_bits(row[row > 0]) for row in steps if row.any())
    together = steps.sum(axis=0)
    plain = _mask_bits(population.sum(keepdims=True), changes.sum(keepdims=True)) + _bits(
        together[together > 0]
    )
    return Bounds(
        num_elements=int(population.sum()),
        num_changed=int(changes.sum()),
        one_unit=int(together[1] + together[-1]),
        plain_bits=plain,
        context_bits=context,
    )


def _mask_bits(population: npt.NDArray[np.int64], changes: npt.NDArray[np.int64]) -> float:
    """Bits of a mask: per class n H(k / n)."""
    return sum(
        _bits(np.array([k, n - k])[np.array([k, n - k]) > 0])
        for n, k in zip(population.tolist(), changes.tolist(), strict=True)
        if n
    )


def _bits(counts: npt.NDArray[np.int64]) -> float:
    """Bits of a sequence of symbols with these counts, all above 0."""
    return float((counts * np.log2(counts.sum() / counts)).sum())
