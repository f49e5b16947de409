"""Reading the next batch beside a step: what is used, what is thrown away, and where failures come out."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from astraflow import errors
from astraflow_trainer.batches.rank_batches import RankBatches
from astraflow_trainer.batches.read_ahead import ReadAhead
from astraflow_trainer.batches.source import BatchSource, Ledger, StepBatch
from astraflow_trainer.controls import Controls
from astraflow_trainer.ranks.board import Board
from astraflow_trainer.ranks.reductions import OneRank, Ranks
from support import rank_threads, scripted_batches
from support.scripted_batches import eventually
from support.scripted_dataflow import POLICY, RUN_ID

LEASE_S = 0.6


class Reader:
    """A rank that takes steps and reads ahead, before a scripted server."""

    def __init__(self, source: BatchSource, ranks: Ranks, board: Board | None = None) -> None:
        ahead = ReadAhead(source, lease_s=LEASE_S, is_first=ranks.index == 0, board=board)
        self.batches = RankBatches(source, ranks, ahead=ahead)

    def acquire(self, step: int) -> StepBatch:
        batch = self.batches.acquire(
            step, base_version=step, waiting=lambda reason: None, controls=Controls()
        )
        assert isinstance(batch, StepBatch)
        return batch

    def take(self, step: int) -> tuple[list[str], float]:
        """The rows of a step, and whether they were read ahead."""
        rows = self.batches.fetch(self.acquire(step))
        return [row.trajectory_id for row in rows], self.batches.measured()["read_ahead"]

    def begin(self, step: int) -> None:
        self.batches.read_ahead(step, base_version=step)


@pytest.fixture
def script() -> scripted_batches.ScriptedBatches:
    return scripted_batches.ScriptedBatches(reads_ahead=True)


@pytest.fixture
def reader(script: scripted_batches.ScriptedBatches, tmp_path: Path) -> Iterator[Reader]:
    with scripted_batches.serving(script) as client:
        ledger = Ledger(tmp_path / "ledger")
        source = BatchSource(client, run_id=RUN_ID, policy_id=POLICY, trainer_id="t", ledger=ledger)
        source.claim()
        reader = Reader(source, OneRank())
        yield reader
        reader.batches.end_read_ahead(gives_back=False)


def ends(script: scripted_batches.ScriptedBatches, event: str) -> None:
    eventually(lambda: event in script.events, what=event)


def test_what_was_read_is_used_when_its_step_begins(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    assert reader.take(1) == (["t1-0", "t1-1"], 0.0)
    reader.begin(2)
    ends(script, "fetch 2")
    assert reader.take(2) == (["t2-0", "t2-1"], 1.0)
    assert [event for event in script.events if "fetch" in event] == ["fetch 1", "fetch 2"]
    assert script.events.index("fetch 2") < script.events.index("acquire 2")


def test_the_same_rows_come_without_reading_ahead(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    taken = []
    for script.reads_ahead in (False, True):
        reader.begin(5)
        if script.reads_ahead:
            ends(script, "fetch 5")
        taken.append(reader.batches.fetch(reader.acquire(5)))
    first, second = ([(row.origin, row.reward, row.token_ids.tolist()) for row in rows] for rows in taken)
    assert first == second


def test_another_batch_of_the_step_is_fetched_anew(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    reader.begin(2)
    ends(script, "fetch 2")
    script.renamed[2] = "another"
    assert reader.take(2) == (["t2-0", "t2-1"], 0.0)
    assert script.events.count("fetch 2") == 2


def test_a_batch_that_cannot_be_read_yet_holds_up_nothing(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if not waits.is_set():
            waits.set()
            assert goes_on.wait(scripted_batches.PATIENCE_S)

    script.on_acquire = hold
    reader.begin(2)
    assert waits.wait(scripted_batches.PATIENCE_S)
    assert reader.take(2) == (["t2-0", "t2-1"], 0.0)
    goes_on.set()


def test_the_lease_is_renewed_until_the_step_begins(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    reader.begin(2)
    eventually(lambda: len(script.renewals) > 1, what="renewals")
    assert {renewal.step for renewal in script.renewals} == {2}


def test_payloads_that_cannot_be_fetched_are_the_steps_failure(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    script.fail("FetchBatch", errors.InvalidArgumentError("they are strangers"))
    reader.begin(2)
    eventually(lambda: not script.faults["FetchBatch"], what="the failure")
    with pytest.raises(errors.InvalidArgumentError, match="they are strangers"):
        reader.take(2)


def test_a_refusal_to_read_ahead_leaves_the_step_as_it_is(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    script.fail("AcquireBatch", errors.InvalidArgumentError("a server of an earlier release"))
    reader.begin(2)
    eventually(lambda: not script.faults["AcquireBatch"], what="the refusal")
    assert reader.take(2) == (["t2-0", "t2-1"], 0.0)


def test_a_batch_that_is_not_what_it_says_is_left_to_its_step(
    script: scripted_batches.ScriptedBatches, reader: Reader
) -> None:
    script.spoiled_batches.append(lambda batch: batch.items.pop())
    reader.begin(2)
    ends(script, "ahead 2")
    assert reader.take(2) == (["t2-0", "t2-1"], 0.0)
    assert "nack" not in " ".join(script.events)


@pytest.mark.parametrize("gives_back", [True, False])
def test_the_end_of_training_gives_back_what_was_read(
    script: scripted_batches.ScriptedBatches, reader: Reader, gives_back: bool
) -> None:
    reader.begin(2)
    ends(script, "fetch 2")
    reader.batches.end_read_ahead(gives_back=gives_back)
    nacks = [event for event in script.events if event.startswith("nack")]
    assert nacks == (["nack 2 b2 trainer_ended"] if gives_back else [])


@pytest.mark.parametrize("late", [False, True])
def test_each_rank_reads_its_share_of_what_the_first_one_bound(
    script: scripted_batches.ScriptedBatches, tmp_path: Path, late: bool
) -> None:
    """Whether a follower has read its share or not: what the ranks do together stays the same."""
    store = HashStore()
    with scripted_batches.serving(script) as client:

        def one(ranks: rank_threads.ThreadRanks) -> tuple[list[str], float]:
            ledger = Ledger(tmp_path / str(ranks.index))
            source = BatchSource(client, run_id=RUN_ID, policy_id=POLICY, trainer_id="t", ledger=ledger)
            source.epoch = script.epoch
            reader = Reader(source, ranks, Board(store))
            reader.take(1)
            if not (late and ranks.index):
                reader.begin(2)
            if ranks.index == 0:
                num_reading = 1 if late else 2
                eventually(lambda: script.events.count("fetch 2") == num_reading, what="reading")
            ranks.broadcast(b"both have read")
            found = reader.take(2)
            reader.batches.end_read_ahead(gives_back=True)
            return found

        first, second = rank_threads.run_ranks(2, one)
    assert (first, second) == ((["t2-0"], float(not late)), (["t2-1"], float(not late)))
    assert script.events.count("ahead 2") == script.events.count("acquire 2") == 1
