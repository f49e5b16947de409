"""Claims, batches, payloads, acks, the ledger and the lease, against a scripted server over real gRPC."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astraflow import errors
from astraflow.dataflow.v1 import batch_service_pb2
from astraflow_trainer.batches.source import BatchSource, Claim, Ledger, StepBatch
from support.scripted_batches import ScriptedBatches, batch_of, eventually, serving
from support.scripted_dataflow import POLICY, RUN_ID


@pytest.fixture
def script() -> ScriptedBatches:
    return ScriptedBatches()


@pytest.fixture
def source(script: ScriptedBatches, tmp_path: Path) -> Iterator[BatchSource]:
    """Of a trainer that has claimed its policy."""
    with serving(script) as client:
        ledger = Ledger(tmp_path / "work" / "ledger.jsonl")
        source = BatchSource(client, run_id=RUN_ID, policy_id=POLICY, trainer_id="host:1", ledger=ledger)
        source.claim()
        yield source


def _acquire(source: BatchSource, step: int = 1, *, base_version: int = 0) -> StepBatch:
    batch = source.acquire(step, base_version=base_version, waiting=lambda _: None, stopped=lambda: False)
    assert batch is not None
    return batch


def _ledger(folder: Path) -> list[dict[str, object]]:
    path = folder / "work" / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_claim_tells_the_epoch_and_where_earlier_trainers_were(
    script: ScriptedBatches, source: BatchSource
) -> None:
    known = {"last_finished_step": 9, "last_durable_step": 8, "version": 7, "batch_lease_s": 2.5}
    for name, value in known.items():
        setattr(script, name, value)
    assert source.claim() == Claim(3, **known, data_incarnation="data-1")  # type: ignore[arg-type]
    assert source.epoch == 3
    assert script.events[-1] == f"claim {RUN_ID} {POLICY} host:1"


def test_a_claim_before_the_first_version_has_none(source: BatchSource) -> None:
    assert source.claim().version is None


def test_waiting_for_a_batch_tells_the_servers_reasons(script: ScriptedBatches, source: BatchSource) -> None:
    script.empty_polls.extend(["policy_version", ""])
    reasons: list[str] = []
    batch = source.acquire(4, base_version=2, waiting=reasons.append, stopped=lambda: False)
    assert batch is not None
    bound = batch.bound
    assert (bound.step, bound.batch_id, bound.digest, bound.base_version) == (4, "b4", b"\4" * 32, 2)
    assert reasons == ["policy_version", "ready_groups"]
    assert script.base_versions == [2, 2, 2]


def test_a_stop_ends_the_wait_for_a_batch(script: ScriptedBatches, source: BatchSource) -> None:
    script.empty_polls.extend(["ready_groups"] * 50)
    reasons: list[str] = []
    stopped = source.acquire(1, base_version=0, waiting=reasons.append, stopped=lambda: len(reasons) == 3)
    assert stopped is None
    assert "acquire 1" not in script.events


def test_staleness_counts_versions_between_the_base_and_the_oldest_token(source: BatchSource) -> None:
    assert _acquire(source, base_version=5).staleness() == [0, 1]


def test_rows_come_in_the_batchs_order_with_its_rewards_and_groups(source: BatchSource) -> None:
    """The scripted server sends payloads in reverse."""
    rows = source.fetch(_acquire(source))
    wanted = [("t1-0", "g1", 0.0), ("t1-1", "g1", 1.0)]
    assert [(row.trajectory_id, row.group_id, row.reward) for row in rows] == wanted
    assert rows[0].token_ids.tolist() == [1, 2, 3]
    assert rows[0].loss_mask.tolist() == [False, True, True]
    assert rows[0].behavior_logprobs.tolist() == [0.0, -1.0, -2.0]
    assert [(span.start, span.end, span.version) for span in rows[0].version_spans] == [(1, 3, 0)]
    assert rows[0].temperature == 0.5


def test_a_payload_that_does_not_arrive_is_an_error_that_names_it(
    script: ScriptedBatches, source: BatchSource
) -> None:
    script.num_lost = 1
    with pytest.raises(errors.InternalError, match="1 of 2 payloads did not arrive, the first is t1-1"):
        source.fetch(_acquire(source))


@pytest.mark.parametrize(("skipped", "stage"), [(False, "trained"), (True, "skipped")])
def test_intent_and_outcome_carry_the_batch_and_its_digest(
    script: ScriptedBatches, source: BatchSource, skipped: bool, stage: str
) -> None:
    batch = _acquire(source, 2)
    source.record_intent(batch)
    source.finish(batch, skipped=skipped)
    assert script.events[-2:] == ["intent 2", f"{stage} 2"]
    assert {(ack.batch_id, ack.digest, ack.trainer_epoch) for ack in script.acks} == {("b2", b"\2" * 32, 3)}


def test_the_ledger_names_what_a_step_trained_on(source: BatchSource, tmp_path: Path) -> None:
    source.finish(_acquire(source, 1), skipped=False)
    source.finish(_acquire(source, 2), skipped=True)
    first, second = _ledger(tmp_path)
    ids = [item.trajectory_id for item in batch_of(1).items]
    bound = {"step": 1, "epoch": 3, "batch_id": "b1", "digest": "01" * 32}
    assert first == {**bound, "stage": "TRAINED", "trajectory_ids": ids}
    assert (second["step"], second["stage"]) == (2, "SKIPPED")


def test_nothing_acked_is_missing_from_the_ledger(
    script: ScriptedBatches, source: BatchSource, tmp_path: Path
) -> None:
    """The line is written before the ack, so it is there even when the ack is refused."""
    script.fail("AckBatch", errors.FencedError("a newer trainer has taken over"))
    batch = _acquire(source)
    with pytest.raises(errors.FencedError):
        source.finish(batch, skipped=False)
    assert [line["stage"] for line in _ledger(tmp_path)] == ["TRAINED"]
    assert script.acks == []


def test_a_replayed_step_is_not_acked_again_but_is_in_the_ledger(
    script: ScriptedBatches, source: BatchSource, tmp_path: Path
) -> None:
    script.last_finished_step = 1
    source.claim()
    batch = _acquire(source, 1)
    source.record_intent(batch)
    source.finish(batch, skipped=False)
    assert batch.finished_before
    assert not _acquire(source, 2).finished_before
    assert script.acks == []
    assert [line["step"] for line in _ledger(tmp_path)] == [1]


def test_a_durable_step_is_told_under_the_claimed_epoch(script: ScriptedBatches, source: BatchSource) -> None:
    script.epoch = 8
    source.claim()
    source.mark_durable(6)
    assert script.events[-1] == "durable 6"
    assert script.epochs == {8}


CALLS: dict[str, Callable[[BatchSource, StepBatch], object]] = {
    "AcquireBatch": lambda source, batch: _acquire(source),
    "AckBatch": lambda source, batch: source.record_intent(batch),
    "FetchBatch": lambda source, batch: source.fetch(batch),
    "MarkDurable": lambda source, batch: source.mark_durable(1),
}


@pytest.mark.parametrize("rpc", CALLS)
def test_a_newer_epoch_ends_this_trainer_at_any_call(
    rpc: str, script: ScriptedBatches, source: BatchSource
) -> None:
    batch = _acquire(source)
    script.fail(rpc, errors.FencedError("epoch 3 is over, 4 holds the policy"))
    with pytest.raises(errors.FencedError, match="4 holds the policy"):
        CALLS[rpc](source, batch)


def test_the_lease_is_renewed_while_a_batch_is_in_hand_and_not_after(
    script: ScriptedBatches, source: BatchSource
) -> None:
    with source.kept_alive(_acquire(source, 5), lease_s=0.1):
        eventually(lambda: script.renewals, what="a renewal")
    renewals = len(script.renewals)
    assert [(renewal.step, renewal.trainer_epoch) for renewal in script.renewals] == [(5, 3)] * renewals


def test_a_failed_renewal_leaves_the_step_alone_and_is_repeated(
    script: ScriptedBatches, source: BatchSource
) -> None:
    script.fail("RenewBatch", errors.UnavailableError("restarting"))
    with source.kept_alive(_acquire(source), lease_s=0.1):
        eventually(lambda: len(script.renewals) >= 2, what="a renewal after the failed one")


@pytest.mark.parametrize(
    "refusal", [errors.FencedError("a newer trainer"), errors.InvalidArgumentError("no such step")]
)
def test_a_refused_renewal_ends_renewing_and_the_next_call_tells(
    script: ScriptedBatches, source: BatchSource, refusal: errors.AstraflowError
) -> None:
    script.fail("RenewBatch", refusal)
    script.fail("AckBatch", refusal)
    batch = _acquire(source)
    with source.kept_alive(batch, lease_s=0.1):
        eventually(lambda: script.renewals, what="a renewal")
        with pytest.raises(type(refusal)):
            source.record_intent(batch)
    assert len(script.renewals) == 1


def test_stages_of_the_contract_are_those_that_count_as_finished() -> None:
    """A stage added to the contract must be judged here, or a replay would ack it again."""
    judged = ("UNSPECIFIED", "INTENT", "TRAINED", "SKIPPED")
    assert set(batch_service_pb2.BatchStage.keys()) == {f"BATCH_STAGE_{stage}" for stage in judged}


def test_a_ledger_line_that_a_crash_cut_short_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "traj')
    Ledger(path)
    assert path.read_text() == '{"step": 1}\n'


def test_a_claim_waits_for_a_server_that_is_away(script: ScriptedBatches, source: BatchSource) -> None:
    script.fail("ClaimPolicy", errors.UnavailableError("Redis restarts"))
    assert source.claim().epoch == 3


def test_asking_about_the_epoch_names_who_has_a_newer_one(
    script: ScriptedBatches, source: BatchSource
) -> None:
    script.fail("RenewBatch", errors.NotFoundError("no batch is bound to step 1"))
    source.require_epoch(1)
    script.fail("RenewBatch", errors.FencedError("epoch 4, of trainer b"))
    with pytest.raises(errors.FencedError, match="trainer b"):
        source.require_epoch(1)


def test_a_replayed_step_is_recorded_as_it_was_the_first_time(
    script: ScriptedBatches, source: BatchSource
) -> None:
    script.last_finished_step = 1
    source.claim()
    assert source.finish(_acquire(source), skipped=True) is False


def test_a_trainer_says_that_it_lives_and_at_the_end_that_it_ends(
    script: ScriptedBatches, source: BatchSource
) -> None:
    script.fail(
        "HoldPolicy", errors.UnavailableError("restarting"), errors.FencedError("Redis lost the claim")
    )
    with source.held(lease_s=0.1):
        eventually(lambda: len(script.holds) >= 3, what="a sign of life after failed ones")
        assert {hold.trainer_epoch for hold in script.holds} == {3}
        assert "release 3" not in script.events
    assert script.events[-1] == "release 3"


@pytest.mark.parametrize("refusal", [errors.FencedError("a newer trainer"), errors.UnavailableError("gone")])
def test_a_trainer_ends_as_it_does_whether_or_not_it_can_let_go(
    script: ScriptedBatches, source: BatchSource, refusal: errors.AstraflowError
) -> None:
    script.fail("ReleasePolicy", refusal)
    with pytest.raises(ZeroDivisionError), source.held(lease_s=60):
        raise ZeroDivisionError
    assert "release 3" not in script.events
