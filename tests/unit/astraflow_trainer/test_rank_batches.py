"""One batch for two ranks: who speaks to the server, who fetches what, and how the end of training travels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from astraflow.errors import FencedError
from astraflow_trainer.batch_source import BatchSource, Ledger, StepBatch
from astraflow_trainer.rank_batches import RankBatches
from support.rank_threads import ThreadRanks, run_ranks
from support.scripted_batches import ScriptedBatches, serving
from support.scripted_dataflow import POLICY, RUN_ID

T = TypeVar("T")


def _on_ranks(
    script: ScriptedBatches, folder: Path, work: Callable[[RankBatches, int], T], *, size: int = 2
) -> list[T]:
    """Claim once, then call `work(batches, rank)` on every rank."""
    with serving(script) as client:

        def one(ranks: ThreadRanks) -> T:
            source = BatchSource(
                client,
                run_id=RUN_ID,
                policy_id=POLICY,
                trainer_id="t",
                ledger=Ledger(folder / f"{ranks.index}"),
            )
            source.epoch = int(ranks.tell(str(source.claim().epoch if ranks.index == 0 else 0).encode()))
            return work(RankBatches(source, ranks), ranks.index)

        return run_ranks(size, one)


def _acquire(
    batches: RankBatches, *, waits: list[str] | None = None, stopped: bool = False
) -> StepBatch | None:
    waited = [] if waits is None else waits
    return batches.acquire(1, base_version=4, waiting=waited.append, stopped=lambda: stopped)


def test_every_rank_gets_the_batch_that_the_first_one_acquired(tmp_path: Path) -> None:
    script = ScriptedBatches()
    first, second = _on_ranks(script, tmp_path, lambda batches, _: _acquire(batches))
    assert first is not None
    assert second is not None
    assert (second.step, second.batch_id, second.digest, second.base_version) == (1, "b1", b"\1" * 32, 4)
    assert list(second.items) == list(first.items)
    assert second.staleness() == first.staleness()
    assert script.events.count("acquire 1") == 1


@pytest.mark.parametrize("last_finished_step", [0, 1])
def test_every_rank_knows_whether_a_step_is_replayed(tmp_path: Path, last_finished_step: int) -> None:
    script = ScriptedBatches(last_finished_step=last_finished_step)
    found = _on_ranks(script, tmp_path, lambda batches, _: _acquire(batches))
    assert [batch is not None and batch.finished_before for batch in found] == [last_finished_step == 1] * 2


def test_each_rank_fetches_only_its_share(tmp_path: Path) -> None:
    script = ScriptedBatches()

    def fetch(batches: RankBatches, _: int) -> tuple[list[str], dict[str, float]]:
        batch = _acquire(batches)
        assert batch is not None
        return [row.trajectory_id for row in batches.fetch(batch)], batches.measured()

    (first, measured), (second, _) = _on_ranks(script, tmp_path, fetch)
    assert (first, second) == (["t1-0"], ["t1-1"])
    assert sorted(map(tuple, script.fetched)) == [("t1-0",), ("t1-1",)]
    assert measured["fetched_bytes"] == 2 * measured["fetched_bytes_rank_0"] > 0
    assert measured["fetched_share_max"] == 0.5


def test_a_rank_without_a_share_fetches_nothing(tmp_path: Path) -> None:
    """Naming no trajectory would mean all of them."""
    script = ScriptedBatches()

    def fetch(batches: RankBatches, _: int) -> int:
        batch = _acquire(batches)
        assert batch is not None
        return len(batches.fetch(batch))

    assert _on_ranks(script, tmp_path, fetch, size=3) == [1, 1, 0]
    assert len(script.fetched) == 2


def test_only_the_first_rank_tells_the_server_how_far_a_step_is(tmp_path: Path) -> None:
    script = ScriptedBatches()

    def step(batches: RankBatches, _: int) -> None:
        batch = _acquire(batches)
        assert batch is not None
        batches.record_intent(batch)
        with batches.kept_alive(batch, lease_s=60.0):
            batches.finish(batch, skipped=False)
        batches.mark_durable(1)

    _on_ranks(script, tmp_path, step)
    assert [event for event in script.events if event.split()[0] in ("intent", "trained", "durable")] == [
        "intent 1",
        "trained 1",
        "durable 1",
    ]
    assert (tmp_path / "0").exists()
    assert not (tmp_path / "1").exists()


def test_the_first_ranks_wish_to_stop_is_everybodys(tmp_path: Path) -> None:
    """The follower asks to stop too late, or not at all: only the first rank decides."""
    found = _on_ranks(ScriptedBatches(), tmp_path, lambda batches, rank: _acquire(batches, stopped=rank == 0))
    assert found == [None, None]
    found = _on_ranks(ScriptedBatches(), tmp_path, lambda batches, rank: _acquire(batches, stopped=rank == 1))
    assert all(batch is not None for batch in found)


def test_followers_are_told_what_the_first_rank_waits_for(tmp_path: Path) -> None:
    script = ScriptedBatches()
    script.empty_polls.extend(["ready_groups", "publish"])
    waits: dict[int, list[str]] = {0: [], 1: []}
    _on_ranks(script, tmp_path, lambda batches, rank: _acquire(batches, waits=waits[rank]))
    assert waits == {0: ["ready_groups", "publish"], 1: ["ready_groups", "publish"]}


def test_a_first_rank_that_is_fenced_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    script = ScriptedBatches()
    script.fail("AcquireBatch", FencedError("epoch 4 holds the policy"))
    with pytest.raises(FencedError, match="epoch 4"):
        _on_ranks(script, tmp_path, lambda batches, _: _acquire(batches))
