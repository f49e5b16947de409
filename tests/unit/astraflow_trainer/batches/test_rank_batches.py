"""One batch for two ranks: who speaks to the server, who fetches what, and how the end of training travels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from structlog.testing import capture_logs

from astraflow.errors import FencedError
from astraflow_trainer.batches.rank_batches import RankBatches, balanced_shares
from astraflow_trainer.batches.source import BatchSource, Ledger, StepBatch
from astraflow_trainer.controls import PAUSED, Controls, Orders
from support import rank_threads, scripted_batches
from support.scripted_dataflow import POLICY, RUN_ID

T = TypeVar("T")


@dataclass
class Bench:
    """Ranks of one trainer before a scripted server."""

    folder: Path
    script: scripted_batches.ScriptedBatches = field(default_factory=scripted_batches.ScriptedBatches)

    def run(self, work: Callable[[RankBatches, int], T], *, size: int = 2) -> list[T]:
        """Claim once, then call `work(batches, rank)` on every rank."""
        with scripted_batches.serving(self.script) as client:

            def one(ranks: rank_threads.ThreadRanks) -> T:
                ledger = Ledger(self.folder / f"{ranks.index}")
                source = BatchSource(client, run_id=RUN_ID, policy_id=POLICY, trainer_id="t", ledger=ledger)
                epoch = source.claim().epoch if ranks.index == 0 else 0
                source.epoch = int(ranks.broadcast(str(epoch).encode()))
                return work(RankBatches(source, ranks), ranks.index)

            return rank_threads.run_ranks(size, one)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def _next(batches: RankBatches, controls: Controls | None = None, *, waits: list[str]) -> StepBatch | Orders:
    return batches.acquire(1, base_version=4, waiting=waits.append, controls=controls or Controls())


def _acquire(batches: RankBatches) -> StepBatch:
    batch = _next(batches, waits=[])
    assert isinstance(batch, StepBatch)
    return batch


@pytest.mark.parametrize("replayed", [False, True])
def test_every_rank_gets_the_batch_that_the_first_one_acquired(bench: Bench, replayed: bool) -> None:
    bench.script.last_finished_step = int(replayed)
    first, second = bench.run(lambda batches, _: _acquire(batches))
    bound = second.bound
    assert (bound.step, bound.batch_id, bound.digest, bound.base_version) == (
        1,
        "b1",
        scripted_batches.batch_of(1).digest,
        4,
    )
    assert list(bound.items) == list(first.bound.items)
    assert second.staleness() == first.staleness()
    assert first.finished_before == second.finished_before == replayed
    assert bench.script.events.count("acquire 1") == 1


def test_each_rank_fetches_only_its_share(bench: Bench) -> None:

    def fetch(batches: RankBatches, _: int) -> tuple[list[str], dict[str, float]]:
        batch = _acquire(batches)
        return [row.trajectory_id for row in batches.fetch(batch)], batches.measured()

    (first, measured), (second, _) = bench.run(fetch)
    assert (first, second) == (["t1-0"], ["t1-1"])
    assert sorted(map(tuple, bench.script.fetched)) == [("t1-0",), ("t1-1",)]
    assert measured["fetched_bytes"] == 2 * measured["fetched_bytes_rank_0"] > 0
    assert measured["fetched_share_max"] == 0.5
    assert measured["turns_mean"] == 2.0  # both answers are of one episode


def test_a_rank_without_a_share_fetches_nothing(bench: Bench) -> None:
    """Naming no trajectory would mean all of them."""
    found = bench.run(lambda batches, _: len(batches.fetch(_acquire(batches))), size=3)
    assert found == [1, 1, 0]
    assert len(bench.script.fetched) == 2


def test_a_group_with_a_bad_payload_on_one_rank_is_left_out_on_all(bench: Bench) -> None:
    bench.script.spoil["t1-1"] = lambda _: b"damaged"

    def fetch(batches: RankBatches, _: int) -> tuple[int, int]:
        return len(batches.fetch(_acquire(batches))), batches.num_left_out

    with capture_logs() as lines:
        assert bench.run(fetch) == [(0, 2), (0, 2)]
    said = [line for line in lines if line["event"] == "batch.group_left_out"]
    assert [(line["task_id"], line["reason"]) for line in said] == [("task-1", "bad_body")]
    bench.script.spoil.clear()
    assert bench.run(fetch) == [(1, 0), (1, 0)]


def test_a_batch_that_the_first_rank_quarantines_is_never_seen_by_the_others(bench: Bench) -> None:
    bench.script.spoiled_batches.append(lambda batch: batch.items.pop())

    def taken(batches: RankBatches, _: int) -> tuple[int, float]:
        return len(_acquire(batches).bound.items), batches.measured()["num_quarantined_batches"]

    assert bench.run(taken) == [(2, 1.0), (2, 0.0)]
    assert [event for event in bench.script.events if "nack" in event] == ["nack 1 b1 digest_mismatch"]


def test_only_the_first_rank_tells_the_server_how_far_a_step_is(bench: Bench) -> None:

    def step(batches: RankBatches, rank: int) -> None:
        batch = _acquire(batches)
        batches.record_intent(batch)
        last = batch.bound.items[-1].trajectory_id
        with batches.kept_alive(batch, lease_s=60.0):
            batches.finish(batch, skipped=False, mismatch_kl={last: 0.5} if rank else {})
        batches.mark_durable(1)

    bench.run(step)
    told = [event for event in bench.script.events if event.split()[0] in ("intent", "trained", "durable")]
    assert told == ["intent 1", "trained 1", "durable 1"]
    assert list(bench.script.acks[-1].mismatch_kl) == [-1.0, 0.5]
    assert (bench.folder / "0").exists()
    assert not (bench.folder / "1").exists()


ORDERS = [
    (Controls.stop_after_step, Orders(stop=True)),
    (lambda controls: controls.checkpoint(), Orders(checkpoint=True)),
    (lambda controls: controls.set_learning_rate(0.125), Orders(learning_rate=0.125)),
]


@pytest.mark.parametrize(("ask", "orders"), ORDERS, ids=["stop", "checkpoint", "learning rate"])
def test_what_is_asked_of_the_first_rank_is_everybodys(
    bench: Bench, ask: Callable[[Controls], object], orders: Orders
) -> None:
    """A follower that is asked keeps it to itself: only the first rank decides."""
    asked = Controls()
    asked.at(0)
    ask(asked)

    def obeyed(asked_rank: int) -> list[StepBatch | Orders]:
        controls = {asked_rank: asked}
        return bench.run(lambda batches, rank: _next(batches, controls.get(rank), waits=[]))

    assert obeyed(0) == [orders, orders]
    assert all(isinstance(batch, StepBatch) for batch in obeyed(1))


def test_a_pause_of_the_first_rank_keeps_the_others_informed(bench: Bench) -> None:
    controls, waits = Controls(), {0: [""], 1: [""]}
    controls.pause("maintenance")

    def resumed_after_a_word(batches: RankBatches, rank: int) -> StepBatch | Orders:
        if rank == 1:
            return _next(batches, waits=waits[1])

        def heard(reason: str) -> None:
            waits[0].append(reason)
            controls.resume()

        return batches.acquire(1, base_version=4, waiting=heard, controls=controls)

    found = bench.run(resumed_after_a_word)
    assert all(isinstance(batch, StepBatch) for batch in found)
    assert waits == {0: ["", PAUSED], 1: ["", PAUSED]}


def test_followers_are_told_what_the_first_rank_waits_for(bench: Bench) -> None:
    bench.script.empty_polls.extend(["ready_groups", "publish"])
    waits: dict[int, list[str]] = {0: [], 1: []}
    bench.run(lambda batches, rank: _next(batches, waits=waits[rank]))
    assert waits == {0: ["ready_groups", "publish"], 1: ["ready_groups", "publish"]}


def test_a_first_rank_that_is_fenced_does_not_leave_the_others_waiting(bench: Bench) -> None:
    bench.script.fail("AcquireBatch", FencedError("epoch 4 holds the policy"))
    with pytest.raises(FencedError, match="epoch 4"):
        bench.run(lambda batches, _: _acquire(batches))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_trajectory_has_one_rank_and_tokens_are_spread_evenly(num_ranks: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 200, 40).tolist()
    shares = balanced_shares(lengths, num_ranks=num_ranks)
    assert sorted(position for share in shares for position in share) == list(range(40))
    loads = [sum(lengths[position] for position in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


SHARES = [
    pytest.param([5, 5, 5, 5], 2, [[0, 2], [1, 3]], id="equal rows are halved"),
    pytest.param([10, 100, 30, 60], 2, [[1], [0, 2, 3]], id="a long row against many short ones"),
    pytest.param([7], 3, [[0], [], []], id="more ranks than rows"),
]


@pytest.mark.parametrize(("lengths", "num_ranks", "shares"), SHARES)
def test_shares_of_a_batch(lengths: list[int], num_ranks: int, shares: list[list[int]]) -> None:
    assert balanced_shares(lengths, num_ranks=num_ranks) == shares


def test_a_number_of_ranks_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks 0 must be at least 1"):
        balanced_shares([1], num_ranks=0)
