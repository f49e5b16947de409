"""What calls recorded becomes what a trajectory refers to: the experts of the call that sampled each token."""

from collections.abc import Sequence

import numpy as np
import pytest
from structlog.testing import capture_logs

from astraflow.plugins import Trajectory, VersionSpan
from astraflow_kit.metrics import Metrics
from astraflow_raas.work.expert_records import ExpertBlobs, ExpertRecord
from astraflow_trainer.batches.routing import RouterShape, recorded_routing
from astraflow_weights.errors import StoreRefused, Unavailable
from support.stepped_store import MemoryStore

LAYERS, EACH = 2, 2


def routed(num_tokens: int, *, first: int) -> np.ndarray:
    """Rows that say which call they are of, and which position."""
    places = np.arange(num_tokens, dtype=np.uint8)[:, None, None]
    return np.broadcast_to(places, (num_tokens, LAYERS, EACH)) + np.array([first, first + 1], np.uint8)


def trajectory(token_ids: Sequence[int], trained: Sequence[int]) -> Trajectory:
    mask = [place in trained for place in range(len(token_ids))]
    logprobs = [-1.0 if chosen else 0.0 for chosen in mask]
    spans = (VersionSpan(0, 1, 5), VersionSpan(1, len(token_ids), 7))
    return Trajectory("solver", token_ids, mask, logprobs, version_spans=spans, reward=0.0)


def first_ids(found: np.ndarray | None) -> list[int]:
    assert found is not None
    return [int(row[0, 0]) for row in found]


def test_a_token_has_the_experts_of_the_call_that_sampled_it() -> None:
    record = ExpertRecord()
    record.add([1, 2, 3], routed(2, first=100))
    record.add([1, 2, 3, 4, 5, 6], routed(5, first=200))
    # The second call computes what the first had not: its last token, and what follows.
    both = first_ids(record.of(trajectory([1, 2, 3, 4, 5, 6], trained=[2, 5])))
    assert both == [100, 101, 202, 203, 204, 0]
    alone = first_ids(record.of(trajectory([1, 2, 3], trained=[2])))
    assert alone == [100, 101, 0], "a trajectory of a turn of its own"


def test_an_episode_may_have_more_calls_than_python_has_frames() -> None:
    record, last = ExpertRecord(), 1100
    for end in range(2, last + 1):
        record.add(range(end), routed(end - 1, first=end % 100))
    assert len(first_ids(record.of(trajectory(range(last), trained=[last - 1])))) == last


def test_branches_from_one_prompt_do_not_mix() -> None:
    record = ExpertRecord()
    record.add([1, 2, 3], routed(2, first=10))
    record.add([1, 2, 9], routed(2, first=30))
    record.add([1, 2, 9, 9], routed(3, first=50))
    assert first_ids(record.of(trajectory([1, 2, 3], trained=[2]))) == [10, 11, 0]
    assert first_ids(record.of(trajectory([1, 2, 9, 9], trained=[2, 3]))) == [30, 31, 52, 0]


def test_what_follows_the_last_sampled_token_needs_none() -> None:
    record = ExpertRecord()
    record.add([1, 2, 3], routed(2, first=10))
    found = record.of(trajectory([1, 2, 3, 7, 7], trained=[2]))
    assert first_ids(found) == [10, 11, 0, 0, 0]
    assert found is not None
    RouterShape(num_layers=LAYERS, num_experts=64, experts_per_token=EACH).require("t", found)


@pytest.mark.parametrize(
    ("token_ids", "trained"),
    [([1, 2, 3, 4], [2, 3]), ([9, 2, 3], [2]), ([1, 2], [1])],
    ids=["a token sampled elsewhere", "another prompt", "less than a call"],
)
def test_tokens_that_no_call_had_in_their_place_have_no_experts(
    token_ids: list[int], trained: list[int]
) -> None:
    record = ExpertRecord()
    record.add([1, 2, 3], routed(2, first=10))
    assert record.of(trajectory(token_ids, trained)) is None
    assert ExpertRecord().of(trajectory(token_ids, trained)) is None


class Refusing(MemoryStore):
    """Takes no blob."""

    error: Exception = Unavailable("it does not answer")

    def put_if_absent(self, key: str, data: bytes) -> object:  # type: ignore[override]
        raise self.error


def blobs(store: MemoryStore, metrics: Metrics) -> ExpertBlobs:
    return ExpertBlobs(store, store_uri="s3://bucket/store", run_id="run", metrics=metrics)


async def test_the_trainer_reads_what_the_node_wrote() -> None:
    store, record, metrics = MemoryStore(), ExpertRecord(), Metrics()
    record.add([1, 2, 3], routed(2, first=10))
    asked = [trajectory([1, 2, 3], [2]), trajectory([4], [0])]
    other, ref = await blobs(store, metrics).refs(
        [Trajectory("judge", [1], [True], [-1.0], (), 0.0), asked[0]], {"solver": [ExpertRecord(), record]}
    )
    assert other is None
    assert ref is not None
    assert ref.uri.startswith("s3://bucket/store/run/blobs/experts/solver/000000000007/")
    key = ref.uri.removeprefix("s3://bucket/store/")
    found = recorded_routing(ref, name="t", num_tokens=3, read=lambda _: store.objects[key])
    assert np.array_equal(found, record.of(asked[0]))
    # Written once, whoever has it again.
    assert await blobs(store, metrics).refs(asked[:1], {"solver": [record]}) == [ref]
    with capture_logs() as logs:
        assert await blobs(store, metrics).refs(asked[1:], {"solver": [record]}) == [None]
    assert [entry["event"] for entry in logs] == ["experts.not_recorded"]


async def test_a_store_that_does_not_take_them_costs_the_experts_alone() -> None:
    record, metrics = ExpertRecord(), Metrics()
    record.add([1, 2, 3], routed(2, first=10))
    with capture_logs() as logs:
        found = await blobs(Refusing(), metrics).refs([trajectory([1, 2, 3], [2])], {"solver": [record]})
    assert found == [None]
    assert [entry["event"] for entry in logs] == ["experts.not_stored"]


def test_a_node_that_may_not_write_is_told_what_to_do() -> None:
    refusing = Refusing()
    refusing.error = StoreRefused("the dataflow server granted this node only reads")
    with pytest.raises(
        StoreRefused, match=r"only reads; trainer.router_replay .* s3://bucket/store/run/blobs/"
    ):
        blobs(refusing, Metrics()).require_writable()
    store = MemoryStore()
    blobs(store, Metrics()).require_writable()
    blobs(store, Metrics()).require_writable()
    assert len(store.objects) == 1
