"""What a row may be reused for: the longest shared prefix of the right space, under the current weights."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_engine.prefix_cache import PrefixIndex

PROMPT = list(range(10, 40))


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(num_rows=4, capacity=64)


def longest(index: PrefixIndex, space: str = "") -> tuple[int, int] | None:
    """Row and length of the best match for the prompt."""
    match = index.best_match(PROMPT, space=space)
    return match and (match.row, match.length)


def test_the_longest_shared_prefix_wins(index: PrefixIndex) -> None:
    index.record(0, tokens=PROMPT[:12], space="")
    index.record(1, tokens=PROMPT[:20], space="")
    index.record(2, tokens=[*PROMPT[:15], 1, 2, 3], space="")
    assert longest(index) == (1, 20)


def test_the_last_token_is_always_computed(index: PrefixIndex) -> None:
    index.record(3, tokens=PROMPT, space="")
    assert longest(index) == (3, len(PROMPT) - 1)


def test_a_short_overlap_is_not_worth_a_copy(index: PrefixIndex) -> None:
    index.record(0, tokens=PROMPT[:7], space="")
    assert longest(index) is None


def test_a_flush_forgets_every_row(index: PrefixIndex) -> None:
    for row in range(4):
        index.record(row, tokens=PROMPT, space="")
    index.flush()
    assert longest(index) is None


def test_a_forgotten_row_is_not_offered(index: PrefixIndex) -> None:
    index.record(1, tokens=PROMPT, space="")
    index.forget(1)
    assert longest(index) is None


def test_a_shorter_record_does_not_revive_what_stood_behind_it(index: PrefixIndex) -> None:
    index.record(0, tokens=PROMPT, space="")
    index.record(0, tokens=PROMPT[:9], space="")
    assert longest(index) == (0, 9)


def test_exchanged_rows_take_their_tokens_along(index: PrefixIndex) -> None:
    index.record(0, tokens=PROMPT, space="a")
    index.record(2, tokens=PROMPT[:9], space="b")
    index.exchange(0, 2)
    assert [longest(index, space) for space in "ab"] == [(2, 29), (0, 9)]


def test_empty_rows_are_overwritten_first_then_the_longest_unused(index: PrefixIndex) -> None:
    for row in (0, 1, 3):
        index.record(row, tokens=[row, *PROMPT], space="")
    assert index.least_valuable([0, 1, 2, 3]) == 2
    index.best_match([0, *PROMPT], space="")
    assert index.least_valuable([0, 1, 3]) == 1


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=24), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
)
def test_a_match_is_never_longer_than_what_really_agrees(held: list[list[int]], wanted: list[int]) -> None:
    index = PrefixIndex(num_rows=4, capacity=24)
    for row, tokens in enumerate(held):
        index.record(row, tokens=tokens, space="")
    match = index.best_match(wanted, space="")
    agreeing = [common_length(tokens, wanted[:-1]) for tokens in held]
    if match is None:
        assert max(agreeing) < 8
    else:
        assert match.length == max(agreeing) == agreeing[match.row]


def common_length(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
