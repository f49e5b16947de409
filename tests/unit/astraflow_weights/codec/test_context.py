"""Ranks inside classes lead back to the elements they were counted from, on every path."""

import numpy as np
import pytest

from astraflow_weights.codec import CorruptPart, context, kernel
from astraflow_weights.codec.kernel import Isa
from support.weight_models import gaussian_bf16

PATHS = pytest.mark.parametrize("isa", [*Isa, None], ids=lambda isa: isa.name if isa else "numpy")


@PATHS
@pytest.mark.parametrize("size", [1, 63, 64, 65, 8191, 8192, 8193, 8192 + 64, 3 * 8192 + 5 * 64 + 7])
def test_changes_at_the_borders_of_blocks_and_chunks_are_found_again(size: int, isa: Isa | None) -> None:
    """The kernel looks at 64 elements at once and ranks those of 128 such blocks together."""
    base = gaussian_bf16(np.random.default_rng(size), (size,))
    first = context.first_exponent(base)
    borders = np.array([0, 62, 63, 64, 65, 8190, 8191, 8192, 8193, 8255, 8256, size - 1])
    some = np.flatnonzero(np.random.default_rng(1).random(size) < 0.3)
    for changed in (np.unique(borders[borders < size]), np.arange(size), np.arange(0, size, 97), some):
        target = base.copy()
        target[changed] += changed.astype(np.uint16) % 1000 + 1
        with kernel.using(None):
            expected = context.rank(base, target, first=first)
        with kernel.using(isa):
            ranked = context.rank(base, target, first=first)
            positions, steps = context.locate(base, ranked, first=first)
        for name in ("ranks", "steps", "counts", "populations"):
            assert np.array_equal(getattr(ranked, name), getattr(expected, name))
        order = np.argsort(positions)
        assert np.array_equal(positions[order], changed)
        assert np.array_equal(steps[order], (target - base)[changed])


@PATHS
@pytest.mark.parametrize("size", [65, 8192, 20_000])
def test_a_rank_that_its_class_does_not_have_is_refused(size: int, isa: Isa | None) -> None:
    base = gaussian_bf16(np.random.default_rng(size), (size,))
    first = context.first_exponent(base)
    with kernel.using(isa):
        changes = context.rank(base, base + np.uint16(1), first=first)
        fewer = base.copy()
        fewer[-1] ^= 0x4000
        with pytest.raises(CorruptPart, match="does not have in this base"):
            context.locate(fewer, changes, first=first)
