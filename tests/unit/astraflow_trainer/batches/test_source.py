"""Claims, batches, payloads, acks, the ledger and the lease, against a scripted server over real gRPC."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow import errors
from astraflow.client import Client
from astraflow.dataflow.v1 import batch_service_pb2
from astraflow.plugins import VersionSpan
from astraflow_trainer.batches.rows import RowOrigin
from astraflow_trainer.batches.source import BatchSource, Claim, Ledger, StepBatch
from support.scripted_batches import ScriptedBatches, batch_of, eventually, serving
from support.scripted_dataflow import POLICY, RUN_ID

FENCED = errors.FencedError("a newer trainer")


class Trainer(BatchSource):
    """The batches of a trainer that has claimed its policy from a scripted server."""

    def __init__(self, client: Client, script: ScriptedBatches, folder: Path) -> None:
        self.script, self._path = script, folder / "work" / "ledger.jsonl"
        names = {"run_id": RUN_ID, "policy_id": POLICY, "trainer_id": "host:1"}
        super().__init__(client, **names, ledger=Ledger(self._path))
        self.claim()

    def take(self, step: int = 1) -> StepBatch:
        batch = self.acquire(step, base_version=0, waiting=lambda _: None, stopped=lambda: False)
        assert batch is not None
        return batch

    def lines(self) -> list[dict[str, object]]:
        """What the ledger says."""
        return [json.loads(line) for line in self._path.read_text().splitlines()]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    script = ScriptedBatches()
    with serving(script) as client:
        yield Trainer(client, script, tmp_path)


def test_a_claim_tells_the_epoch_and_where_earlier_trainers_were(trainer: Trainer) -> None:
    known = {"last_finished_step": 9, "last_durable_step": 8, "version": 7, "batch_lease_s": 2.5}
    for name, value in known.items():
        setattr(trainer.script, name, value)
    assert trainer.claim() == Claim(3, **known, data_incarnation="data-1")  # type: ignore[arg-type]
    assert trainer.epoch == 3
    assert trainer.script.events[-1] == f"claim {RUN_ID} {POLICY} host:1"


def test_a_claim_before_the_first_version_has_none(trainer: Trainer) -> None:
    assert trainer.claim().version is None


def test_waiting_for_a_batch_tells_the_servers_reasons(trainer: Trainer) -> None:
    trainer.script.empty_polls.extend(["policy_version", ""])
    reasons: list[str] = []
    batch = trainer.acquire(4, base_version=2, waiting=reasons.append, stopped=lambda: False)
    assert batch is not None
    bound = batch.bound
    assert (bound.step, bound.batch_id, bound.digest, bound.base_version) == (4, "b4", b"\4" * 32, 2)
    assert reasons == ["policy_version", "ready_groups"]
    assert trainer.script.base_versions == [2, 2, 2]


@pytest.mark.parametrize("packs", [True, False])
def test_rows_come_in_the_batchs_order_with_its_rewards_and_origins(trainer: Trainer, packs: bool) -> None:
    """The scripted server sends payloads in reverse, in packs or, as an earlier release, each alone."""
    trainer.script.packs = packs
    rows = trainer.fetch(trainer.take())
    assert [(row.trajectory_id, row.reward) for row in rows] == [("t1-0", 0.0), ("t1-1", 1.0)]
    assert [row.origin for row in rows] == [RowOrigin("task-1", POLICY, 1, turn, "sums") for turn in (0, 1)]
    assert rows[0].token_ids.tolist() == [1, 2, 3]
    assert rows[0].loss_mask.tolist() == [False, True, True]
    assert rows[0].behavior_logprobs.tolist() == [0.0, -1.0, -2.0]
    assert rows[0].version_spans == (VersionSpan(1, 3, 0, recomputed=True),)
    assert [row.truncated for row in rows] == [False, True]
    assert rows[0].temperature == 0.5


def test_a_payload_that_does_not_arrive_is_an_error_that_names_it(trainer: Trainer) -> None:
    trainer.script.num_lost = 1
    with pytest.raises(errors.InternalError, match="1 of 2 payloads did not arrive, the first is t1-1"):
        trainer.fetch(trainer.take())


@pytest.mark.parametrize(("skipped", "stage"), [(False, "trained"), (True, "skipped")])
def test_intent_and_outcome_carry_batch_and_digest(trainer: Trainer, skipped: bool, stage: str) -> None:
    batch = trainer.take(2)
    trainer.record_intent(batch)
    trainer.finish(batch, skipped=skipped)
    assert trainer.script.events[-2:] == ["intent 2", f"{stage} 2"]
    for ack in trainer.script.acks:
        assert (ack.batch_id, ack.digest, ack.trainer_epoch) == ("b2", b"\2" * 32, 3)


def test_the_ledger_names_what_a_step_trained_on(trainer: Trainer) -> None:
    trainer.finish(trainer.take(1), skipped=False)
    trainer.finish(trainer.take(2), skipped=True)
    first, second = trainer.lines()
    ids = [item.trajectory_id for item in batch_of(1).items]
    bound = {"step": 1, "epoch": 3, "batch_id": "b1", "digest": "01" * 32}
    assert first == {**bound, "stage": "TRAINED", "trajectory_ids": ids}
    assert (second["step"], second["stage"]) == (2, "SKIPPED")


def test_nothing_acked_is_missing_from_the_ledger(trainer: Trainer) -> None:
    """The line is written before the ack, so it is there even when the ack is refused."""
    trainer.script.fail("AckBatch", FENCED)
    batch = trainer.take()
    with pytest.raises(errors.FencedError):
        trainer.finish(batch, skipped=False)
    assert [line["stage"] for line in trainer.lines()] == ["TRAINED"]
    assert trainer.script.acks == []


def test_a_replayed_step_is_not_acked_again_but_is_in_the_ledger(trainer: Trainer) -> None:
    trainer.script.last_finished_step = 1
    trainer.claim()
    batch = trainer.take(1)
    trainer.record_intent(batch)
    trainer.finish(batch, skipped=False)
    assert batch.finished_before
    assert not trainer.take(2).finished_before
    assert trainer.script.acks == []
    assert [line["step"] for line in trainer.lines()] == [1]


def test_a_durable_step_is_told_under_the_claimed_epoch(trainer: Trainer) -> None:
    trainer.script.epoch = 8
    trainer.claim()
    trainer.mark_durable(6)
    assert trainer.script.events[-1] == "durable 6"
    assert trainer.script.epochs == {8}


CALLS: dict[str, Callable[[Trainer, StepBatch], object]] = {
    "AcquireBatch": lambda trainer, _: trainer.take(),
    "AckBatch": lambda trainer, batch: trainer.record_intent(batch),
    "FetchBatch": lambda trainer, batch: trainer.fetch(batch),
    "MarkDurable": lambda trainer, _: trainer.mark_durable(1),
}


@pytest.mark.parametrize("rpc", CALLS)
def test_a_newer_epoch_ends_this_trainer_at_any_call(rpc: str, trainer: Trainer) -> None:
    batch = trainer.take()
    trainer.script.fail(rpc, errors.FencedError("epoch 3 is over, 4 holds the policy"))
    with pytest.raises(errors.FencedError, match="4 holds the policy"):
        CALLS[rpc](trainer, batch)


def test_the_lease_is_renewed_while_a_batch_is_in_hand(trainer: Trainer) -> None:
    with trainer.kept_alive(trainer.take(5), lease_s=0.1):
        eventually(lambda: trainer.script.renewals, what="a renewal")
    assert {(renewal.step, renewal.trainer_epoch) for renewal in trainer.script.renewals} == {(5, 3)}


def test_a_failed_renewal_leaves_the_step_alone_and_is_repeated(trainer: Trainer) -> None:
    trainer.script.fail("RenewBatch", errors.UnavailableError("restarting"))
    with trainer.kept_alive(trainer.take(), lease_s=0.1):
        eventually(lambda: len(trainer.script.renewals) >= 2, what="a renewal after the failed one")


@pytest.mark.parametrize("refusal", [FENCED, errors.InvalidArgumentError("no such step")])
def test_a_refused_renewal_ends_renewing_and_the_next_call_tells(trainer: Trainer, refusal: Any) -> None:
    trainer.script.fail("RenewBatch", refusal)
    trainer.script.fail("AckBatch", refusal)
    batch = trainer.take()
    with trainer.kept_alive(batch, lease_s=0.1):
        eventually(lambda: trainer.script.renewals, what="a renewal")
        with pytest.raises(type(refusal)):
            trainer.record_intent(batch)
    assert len(trainer.script.renewals) == 1


def test_stages_of_the_contract_are_those_that_count_as_finished() -> None:
    """A stage added to the contract must be judged here, or a replay would ack it again."""
    judged = ("UNSPECIFIED", "INTENT", "TRAINED", "SKIPPED")
    assert set(batch_service_pb2.BatchStage.keys()) == {f"BATCH_STAGE_{stage}" for stage in judged}


def test_a_ledger_line_that_a_crash_cut_short_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "traj')
    Ledger(path)
    assert path.read_text() == '{"step": 1}\n'


def test_a_ledger_keeps_its_newest_lines_in_two_files_and_each_of_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    _append(Ledger(path), epoch=1)
    ledger = Ledger(path, max_bytes=2 * path.stat().st_size)
    for epoch in (2, 3, 4):
        _append(ledger, epoch=epoch)
    assert (_epochs(path.with_name("ledger.1.jsonl")), _epochs(path)) == ([1, 2], [3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", _killed)
        with pytest.raises(KeyboardInterrupt):
            _append(ledger, epoch=5)
    _append(Ledger(path), epoch=5)
    assert (_epochs(path.with_name("ledger.1.jsonl")), _epochs(path)) == ([3, 4], [5])


def _append(ledger: Ledger, *, epoch: int) -> None:
    batch = StepBatch(batch_of(1), batch_service_pb2.BATCH_STAGE_INTENT)
    ledger.append(batch, epoch=epoch, stage="TRAINED")


def _epochs(path: Path) -> list[int]:
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()]


def _killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_claim_waits_for_a_server_that_is_away(trainer: Trainer) -> None:
    trainer.script.fail("ClaimPolicy", errors.UnavailableError("Redis restarts"))
    assert trainer.claim().epoch == 3


def test_asking_about_the_epoch_names_who_has_a_newer_one(trainer: Trainer) -> None:
    trainer.script.fail("RenewBatch", errors.NotFoundError("no batch is bound to step 1"))
    trainer.require_epoch(1)
    trainer.script.fail("RenewBatch", errors.FencedError("epoch 4, of trainer b"))
    with pytest.raises(errors.FencedError, match="trainer b"):
        trainer.require_epoch(1)


def test_a_trainer_says_at_its_end_that_it_ends(trainer: Trainer) -> None:
    trainer.release()
    assert trainer.script.events[-1] == "release 3"


@pytest.mark.parametrize("refusal", [FENCED, errors.UnavailableError("gone")])
def test_a_trainer_ends_as_it_does_whether_or_not_it_can_let_go(trainer: Trainer, refusal: Any) -> None:
    trainer.script.fail("ReleasePolicy", refusal)
    trainer.release()
    assert "release 3" not in trainer.script.events
