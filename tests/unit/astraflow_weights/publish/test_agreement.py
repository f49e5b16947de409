"""All processes end alike, whoever failed."""

from collections.abc import Callable

import pytest

from astraflow.errors import FencedError, InternalError, UnavailableError
from astraflow_weights.errors import Fenced, Unavailable
from astraflow_weights.publish.agreement import on_every_rank, on_first_rank
from support.rank_threads import ThreadRanks, run_ranks


def outcomes(count: int, action: Callable[[ThreadRanks], object]) -> list[object]:
    """What `action` ended with in each of so many processes."""

    def outcome(ranks: ThreadRanks) -> object:
        try:
            return action(ranks)
        except Exception as error:  # noqa: BLE001 - the error is what the test looks at
            return error

    return run_ranks(count, outcome)


def test_what_the_first_process_found_is_known_everywhere() -> None:
    ran = []

    def act(ranks: ThreadRanks) -> int:
        def found() -> int:
            ran.append(ranks.index)
            return 7

        return on_first_rank(ranks, found, encode=int, decode=int)

    assert run_ranks(3, act) == [7, 7, 7]
    assert ran == [0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Unavailable("the store is away"), UnavailableError),
        (Fenced("epoch 4 owns the log"), FencedError),
        (RuntimeError("a defect"), InternalError),
    ],
)
def test_a_failure_of_the_first_process_is_everybodys(error: Exception, kind: type[Exception]) -> None:
    def fail() -> int:
        raise error

    first, second = outcomes(2, lambda ranks: on_first_rank(ranks, fail, encode=int, decode=int))
    assert first is error
    assert isinstance(second, kind)
    assert str(error) in str(second)


def test_every_process_learns_what_all_did() -> None:
    assert run_ranks(3, lambda ranks: on_every_rank(ranks, lambda: ranks.index * 10)) == [[0, 10, 20]] * 3


def test_a_failure_of_any_process_is_everybodys() -> None:
    def upload(ranks: ThreadRanks) -> int:
        if ranks.index == 1:
            raise Unavailable("its disk is full")
        return 1

    found = outcomes(3, lambda ranks: on_every_rank(ranks, lambda: upload(ranks)))
    assert all(isinstance(error, UnavailableError) for error in found)
    assert "process 1 of the publishers failed: its disk is full" in str(found[0])
