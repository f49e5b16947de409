"""Rice coding: the same bytes with and without the kernel, and back again; damage is always noticed."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.codec import CorruptPart, kernel, rice
from astraflow_weights.codec.kernel import Isa
from astraflow_weights.codec.planes import write_varint
from astraflow_weights.codec.rice import Changes

PATHS = (None, *Isa)


@st.composite
def changes(draw: st.DrawFn) -> Changes:
    """Up to five classes of any size, density and kind of step."""
    seed = draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    ranks, steps, counts, populations = [], [], [], []
    for _ in range(draw(st.integers(1, 5))):
        population = draw(st.integers(1, 400))
        chosen = np.flatnonzero(random.random(population) < draw(st.floats(0, 1)))
        spread = draw(st.sampled_from([1, 2, 30, 32_767]))
        size = random.integers(1, spread + 1, len(chosen))
        ranks.append(chosen)
        steps.append(np.where(random.random(len(chosen)) < 0.5, size, -size - (size == 32_767)))
        counts.append(len(chosen))
        populations.append(population)
    return Changes(
        ranks=np.concatenate(ranks).astype(np.uint32),
        steps=np.concatenate(steps).astype(np.int16).view(np.uint16),
        counts=np.array(counts, np.uint32),
        populations=np.array(populations, np.uint32),
    )


def decoded_body(body: bytes, like: Changes) -> Changes:
    return rice.decode(
        memoryview(body), populations=like.populations, num_elements=int(like.populations.sum())
    )


def same(left: Changes, right: Changes) -> bool:
    return all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in ("ranks", "steps", "counts")
    )


@given(changes())
def test_what_is_encoded_comes_back_on_every_path(given_changes: Changes) -> None:
    bodies = set()
    for path in PATHS:
        with kernel.using(path):
            bodies.add(rice.encode(given_changes))
    (body,) = bodies
    for path in PATHS:
        with kernel.using(path):
            decoded = decoded_body(body, given_changes)
            assert same(decoded, given_changes)


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("path", [None, Isa.SCALAR], ids=str)
def test_a_cut_or_lengthened_body_is_refused(path: Isa | None, cut: int) -> None:
    made = Changes(
        ranks=np.arange(0, 900, 9, dtype=np.uint32),
        steps=np.full(100, 7, np.uint16),
        counts=np.array([100], np.uint32),
        populations=np.array([900], np.uint32),
    )
    body = rice.encode(made)
    with kernel.using(path):
        for wrong in (body[:-cut], body + bytes(cut)):
            with pytest.raises(CorruptPart):
                decoded_body(wrong, made)


def hostile_body(*, num_classes: int, count: int, planes: tuple[int, int, int], last: int = 0) -> bytes:
    """A body whose head fits its planes: those of given lengths are all ones, the others as long as must be."""
    class_head = write_varint(count) + bytes([0, 0]) + write_varint(count)
    gap_q, run_q, size_q = planes
    signs = (num_classes * count + 7) // 8
    head = b"".join(map(write_varint, planes)) + class_head * num_classes
    return head + b"\xff" * (gap_q + signs + run_q + size_q + last)


@pytest.mark.parametrize("path", [None, Isa.SCALAR], ids=str)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            hostile_body(num_classes=16, count=50_000, planes=(100_000, 100_000, 100_000), last=2_000_000),
            "800000 changes of 50000 elements",
        ),
        (hostile_body(num_classes=16, count=2, planes=(2_000_000, 4, 4)), "longer than"),
        (hostile_body(num_classes=16, count=2, planes=(4, 2_000_000, 4)), "longer than"),
        (hostile_body(num_classes=16, count=2, planes=(4, 4, 2_000_000)), "longer than"),
        (hostile_body(num_classes=16, count=2, planes=(4, 4, 4), last=2_000_000), "longer than"),
    ],
    ids=["changes", "gaps", "runs", "sizes", "low-bits"],
)
def test_a_hostile_body_is_refused_before_it_is_unfolded(path: Isa | None, body: bytes, message: str) -> None:
    populations = np.full(16, 50_000, np.uint32)
    tracemalloc.start()
    try:
        with kernel.using(path), pytest.raises(CorruptPart, match=message):
            rice.decode(memoryview(body), populations=populations, num_elements=50_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000
