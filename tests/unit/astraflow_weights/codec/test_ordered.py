"""Results come in the order of their items, whatever thread was faster, and the first failure ends the work."""

import threading

import pytest

from astraflow_weights.codec import encode_delta
from astraflow_weights.codec.delta import encode_delta_tiles
from astraflow_weights.codec.ordered import in_order
from astraflow_weights.codec.parts.writer import PartSetHead, write_parts
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.shards import whole
from astraflow_weights.codec.tiles.grid import PartKind
from support.scripted_batches import PATIENCE_S
from support.weight_models import make_model, trained


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_ordered(threads: int) -> None:
    assert list(in_order(str, range(100), threads=threads, name="test")) == [str(n) for n in range(100)]


def test_a_slow_item_holds_back_those_after_it() -> None:
    second_done = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second_done.wait(PATIENCE_S)
        else:
            second_done.set()
        return item

    assert list(in_order(work, [0, 1], threads=2, name="test")) == [0, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_is_raised_in_its_turn(threads: int) -> None:
    done = in_order(lambda item: 1 // item, [1, 0, 1], threads=threads, name="test")
    assert next(done) == 1
    with pytest.raises(ZeroDivisionError):
        next(done)


@pytest.mark.parametrize("context", [False, True])
def test_deltas_have_equal_bytes_for_any_number_of_threads(context: bool) -> None:
    base = make_model(rows=200)
    target = trained(base, 1)
    tiles = encode_delta_tiles(whole(base), whole(target), context=context, threads=3)
    parts = list(write_parts(tiles, head=PartSetHead(kind=PartKind.DELTA), schema=Schema.of_model(base)))
    assert parts == encode_delta(base, target, context=context)
