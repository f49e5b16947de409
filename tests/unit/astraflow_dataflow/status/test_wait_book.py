"""How long something has waited."""

from astraflow_dataflow.rules.waits import Wait
from astraflow_dataflow.status.wait_book import WaitBook


def test_a_wait_is_timed_from_its_first_sight_and_forgotten_when_it_ends() -> None:
    book, wait = WaitBook(), Wait(stage="lease", reason="no_node", detail="", released_by="")
    assert book.waited_ms([wait], now_ms=1000) == [(wait, 0)]
    assert book.waited_ms([wait], now_ms=4000) == [(wait, 3000)]
    assert book.waited_ms([], now_ms=5000) == []
    assert book.waited_ms([wait], now_ms=6000) == [(wait, 0)]


def test_a_wait_that_redis_timed_keeps_that_time() -> None:
    wait = Wait(stage="batch", reason="ready_groups", detail="", released_by="", since_ms=500)
    assert WaitBook().waited_ms([wait], now_ms=1000) == [(wait, 500)]
