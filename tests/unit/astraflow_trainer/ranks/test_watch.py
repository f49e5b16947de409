"""A rank hears at once when another one ends, and why."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from astraflow.errors import AstraflowError, FencedError, InternalError, PluginError
from astraflow_trainer.ranks.watch import RankLostError, RankWatch
from support.scripted_batches import PATIENCE_S, eventually


@dataclass
class Pair:
    """Two ranks over a socket pair; the first one listens."""

    first: RankWatch
    second: RankWatch
    lost: list[AstraflowError] = field(default_factory=list)
    stops: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """The second rank's process is gone."""
        for connection in self.second.connections.values():
            connection.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    ranks = Pair(RankWatch(0, 2, {1: left}), RankWatch(1, 2, {0: right}))
    ranks.first.start(on_lost=ranks.lost.append, on_stop_wanted=ranks.stops.set)
    yield ranks
    ranks.close()
    left.close()


def test_a_connection_that_closes_without_a_word_is_a_dead_rank(pair: Pair) -> None:
    pair.close()
    error = pair.first.failure(wait_s=PATIENCE_S)
    assert isinstance(error, RankLostError)
    assert error.message == "rank 1 of 2 exited without reporting"
    eventually(lambda: pair.lost == [error], what="the listener to be told")


def test_a_rank_that_is_done_is_not_lost(pair: Pair) -> None:
    pair.second.farewell(None)
    pair.close()
    assert pair.first.failure(wait_s=0.2) is None


LAST_WORDS = [
    (FencedError("epoch 4 holds the policy"), FencedError),
    (PluginError("no such plug-in"), PluginError),
    (InternalError("a payload did not arrive"), RankLostError),
    (ValueError("a defect"), RankLostError),
]


@pytest.mark.parametrize(("error", "kind"), LAST_WORDS)
def test_last_words_say_how_the_others_end(pair: Pair, error: Exception, kind: type[AstraflowError]) -> None:
    pair.second.farewell(error)
    pair.close()
    found = pair.first.failure(wait_s=PATIENCE_S)
    assert type(found) is kind
    assert str(found) == f"rank 1 of 2 ended: {error}"
    eventually(lambda: len(pair.lost) == 1, what="the listener to be told once")


def test_a_rank_that_is_asked_to_stop_tells_the_one_that_decides(pair: Pair) -> None:
    pair.second.ask_to_stop()
    assert pair.stops.wait(PATIENCE_S)
    assert pair.first.failure(wait_s=0.0) is None


def test_a_rank_that_stands_still_is_lost_though_its_connection_is_open() -> None:
    left, right = socket.socketpair()
    lost: list[AstraflowError] = []
    first, second = RankWatch(0, 2, {1: left}, 1.0), RankWatch(1, 2, {0: right}, 1.0)
    with left, right:
        first.start(on_lost=lost.append, on_stop_wanted=lambda: None)
        second.start(on_lost=lost.append, on_stop_wanted=lambda: None)
        assert first.failure(wait_s=3.0) is None, "both beat"
        # From here on the second one says nothing more, as when it is stopped.
        second._known.set()
        error = first.failure(wait_s=PATIENCE_S)
        assert isinstance(error, RankLostError)
        assert error.message == "rank 1 of 2 has stood still for 1 s"
        eventually(lambda: error in lost, what="the listener to be told")


def test_telling_a_rank_that_is_gone_does_no_harm(pair: Pair) -> None:
    pair.close()
    assert pair.first.failure(wait_s=PATIENCE_S) is not None
    for _ in range(3):
        pair.first.farewell(FencedError("epoch 4 holds the policy"))
