"""Claims, batches, payloads, acks, the ledger and the lease, against a scripted server over real gRPC."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from astraflow import errors
from astraflow.blobs import blob_prefix, blob_ref
from astraflow.client import Client
from astraflow.dataflow.v1 import batch_service_pb2
from astraflow.plugins import VersionSpan
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_trainer.batches.rows import RowOrigin
from astraflow_trainer.batches.source import BatchSource, Claim, Ledger, StepBatch
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.session import stored_blob
from astraflow_weights.store.file import FileStore
from support.scripted_batches import ScriptedBatches, batch_of, eventually, serving
from support.scripted_dataflow import POLICY, RUN_ID

FENCED = errors.FencedError("a newer trainer")


class Trainer(BatchSource):
    """The batches of a trainer that has claimed its policy from a scripted server."""

    def __init__(self, client: Client, script: ScriptedBatches, folder: Path) -> None:
        self.script, self._path = script, folder / "work" / "ledger.jsonl"
        names: dict[str, Any] = {"run_id": RUN_ID, "policy_id": POLICY, "trainer_id": "host:1"}
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
    assert (bound.step, bound.batch_id, bound.digest, bound.base_version) == (4, "b4", batch_of(4).digest, 2)
    assert reasons == ["policy_version", "ready_groups"]
    assert trainer.script.base_versions == [2, 2, 2]


@pytest.mark.parametrize("packs", [True, False])
def test_rows_come_in_the_batchs_order_with_its_rewards_and_origins(trainer: Trainer, packs: bool) -> None:
    """The scripted server sends payloads in reverse, in packs or, as an earlier release, each alone."""
    trainer.script.packs = packs
    rows = trainer.fetch(trainer.take()).rows
    assert [(row.trajectory_id, row.reward) for row in rows] == [("t1-0", 0.0), ("t1-1", 1.0)]
    assert [row.origin for row in rows] == [RowOrigin("task-1", POLICY, 1, turn, "sums") for turn in (0, 1)]
    assert rows[0].token_ids.tolist() == [1, 2, 3]
    assert rows[0].loss_mask.tolist() == [False, True, True]
    assert rows[0].behavior_logprobs.tolist() == [0.0, -1.0, -2.0]
    assert rows[0].version_spans == (VersionSpan(1, 3, 0, recomputed=True),)
    assert [row.truncated for row in rows] == [False, True]
    assert rows[0].temperature == 0.5


def _body(change: Callable[[trajectory_pb2.Trajectory], object]) -> Callable[[bytes], bytes]:
    """A payload with a change."""

    def changed(body: bytes) -> bytes:
        trajectory = trajectory_pb2.Trajectory.FromString(body)
        change(trajectory)
        return trajectory.SerializeToString()

    return changed


def _set(**fields: Any) -> Callable[[bytes], bytes]:
    return _body(lambda trajectory: [setattr(trajectory, name, value) for name, value in fields.items()])


SPOILED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no message": (lambda _: b"\xff\xff\xff", "bad_body"),
    "cut short": (_body(lambda body: body.ClearField("logprobs")), "length_mismatch"),
    "of another trajectory": (_set(trajectory_id="t9-1"), "id_mismatch"),
    "another mask": (_set(loss_mask=b"\4"), "mask_mismatch"),
    "other tokens": (_set(token_ids=np.asarray([1, 2, 4], dtype="<i4").tobytes()), "digest_mismatch"),
    "another version": (_body(lambda body: setattr(body.version_spans[0], "version", 5)), "version_mismatch"),
    "versions of too few tokens": (
        _body(lambda body: setattr(body.version_spans[0], "end", 2)),
        "spans_not_covering",
    ),
    "no temperature": (_body(lambda body: body.ClearField("sampling")), "bad_temperature"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_payload_that_is_not_what_its_item_says_is_a_problem_of_its_group(
    trainer: Trainer, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    trainer.script.spoil["t1-1"] = spoil
    fetched = trainer.fetch(trainer.take())
    assert [row.trajectory_id for row in fetched.rows] == ["t1-0"]
    [(group, problem)] = fetched.problems.items()
    assert (group, problem.slug) == (("task-1", POLICY), reason)
    assert "t1-1" in problem.detail
    trainer.script.spoil.clear()
    fetched = trainer.fetch(trainer.take())
    assert (len(fetched.rows), fetched.problems) == (2, {})


def test_recorded_experts_come_with_their_row_from_the_runs_store(trainer: Trainer, tmp_path: Path) -> None:
    store, content = FileStore(tmp_path / "store"), bytes(range(6))
    joined = cast("JoinedRun", SimpleNamespace(store_uri=store.uri, run_id=RUN_ID))
    prefix, media = (
        blob_prefix(store.uri, RUN_ID),
        "application/x-astraflow-expert-routing; layers=1; k=2; dtype=uint8",
    )
    ref = blob_ref(content, name="t1-1", prefix=prefix, media_type=media)
    trainer.script.spoil["t1-1"] = _body(lambda body: body.expert_routing.CopyFrom(ref))
    assert trainer.fetch(trainer.take()).rows[1].expert_routing is None  # nobody reads blobs here
    trainer._read_blob = partial(stored_blob, store, joined)
    fetched = trainer.fetch(trainer.take())
    assert [row.trajectory_id for row in fetched.rows] == ["t1-0"]
    problem = fetched.problems["task-1", POLICY]
    assert (problem.slug, "its expert routing is gone" in problem.detail) == ("bad_blob", True)
    store.put_if_absent(f"{RUN_ID}/blobs/t1-1", content)
    plain, routed = trainer.fetch(trainer.take()).rows
    assert plain.expert_routing is None
    assert routed.expert_routing is not None
    assert routed.expert_routing.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    with pytest.raises(LookupError, match="is not below"):
        stored_blob(store, joined, "file:///elsewhere/t1-1")


def test_a_payload_that_is_gone_is_a_problem_of_its_group_and_the_others_come(trainer: Trainer) -> None:
    trainer.script.gone.add("t1-0")
    fetched = trainer.fetch(trainer.take())
    assert [row.trajectory_id for row in fetched.rows] == ["t1-1"]
    assert fetched.problems["task-1", POLICY].slug == "payload_missing"
    trainer.script.fail("FetchBatch", errors.NotFoundError("no batch is bound to step 1"))
    with pytest.raises(errors.NotFoundError, match="no batch is bound"):
        trainer.fetch(trainer.take())


def test_a_trajectory_of_a_version_that_its_step_cannot_know_is_a_problem(trainer: Trainer) -> None:
    trainer.script.spoiled_batches.append(lambda batch: setattr(batch.items[1], "max_version", 1))
    fetched = trainer.fetch(trainer.take())
    assert [row.trajectory_id for row in fetched.rows] == ["t1-0"]
    problem = fetched.problems["task-1", POLICY]
    assert (problem.slug, problem.detail) == (
        "future_version",
        "t1-1: sampled from version 1, its step starts from 0",
    )


BAD_BATCHES: dict[str, tuple[Callable[[Any], object], str]] = {
    "of other trajectories than its digest": (lambda batch: batch.items.pop(), "digest_mismatch"),
    "without a digest": (lambda batch: batch.ClearField("digest"), "digest_mismatch"),
    "of another policy": (lambda batch: setattr(batch, "policy_id", "judge"), "wrong_policy"),
    "of another step": (lambda batch: setattr(batch, "step", 7), "wrong_step"),
    "without trajectories": (lambda batch: batch.ClearField("items"), "empty"),
}


@pytest.mark.parametrize(("spoil", "reason"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_that_is_not_what_it_says_is_quarantined_and_the_next_one_taken(
    trainer: Trainer, spoil: Callable[[Any], object], reason: str
) -> None:
    trainer.script.spoiled_batches.append(spoil)
    with capture_logs() as lines:
        assert trainer.take().bound == batch_of(1)
    assert trainer.script.events[-3:] == ["acquire 1", f"nack 1 b1 {reason}", "acquire 1"]
    assert [(line["event"], line["reason"]) for line in lines] == [("batch.quarantined", reason)]
    assert trainer.num_quarantined == 1
    trainer.take(2)
    assert trainer.num_quarantined == 0


def test_a_server_whose_batches_are_all_bad_ends_the_trainer_before_it_costs_the_run_its_data(
    trainer: Trainer,
) -> None:
    trainer.script.spoiled_batches.extend([lambda batch: batch.ClearField("digest")] * 9)
    with pytest.raises(
        errors.InternalError, match=r"'b1' of step 1 .* digest_mismatch: .*; so were the 3 before it"
    ):
        trainer.take()
    assert sum(event.startswith("nack") for event in trainer.script.events) == 3


def test_a_batch_that_was_trained_on_is_never_given_back(trainer: Trainer) -> None:
    trainer.script.last_finished_step = 1
    trainer.script.spoiled_batches.append(lambda batch: batch.items.pop())
    with pytest.raises(errors.InternalError, match="the step was trained on it"):
        trainer.take()
    assert not any(event.startswith("nack") for event in trainer.script.events)


@pytest.mark.parametrize(("skipped", "stage"), [(False, "trained"), (True, "skipped")])
def test_intent_and_outcome_carry_batch_and_digest(trainer: Trainer, skipped: bool, stage: str) -> None:
    batch = trainer.take(2)
    trainer.record_intent(batch)
    trainer.finish(batch, skipped=skipped)
    assert trainer.script.events[-2:] == ["intent 2", f"{stage} 2"]
    for ack in trainer.script.acks:
        assert (ack.batch_id, ack.digest, ack.trainer_epoch) == ("b2", batch_of(2).digest, 3)


@pytest.mark.parametrize(("skipped", "told"), [(False, [0.5, -1.0]), (True, [])])
def test_what_was_measured_of_each_item_is_told_with_a_trained_step(
    trainer: Trainer, skipped: bool, told: list[float]
) -> None:
    batch = trainer.take()
    trainer.record_intent(batch)
    trainer.finish(batch, skipped=skipped, mismatch_kl=[0.5, -1.0])
    assert [list(ack.mismatch_kl) for ack in trainer.script.acks] == [[], told]


def test_more_figures_than_an_ack_may_have_do_not_refuse_the_step(trainer: Trainer) -> None:
    """64 roles have 448 of their own; the figures of the step itself come first."""
    of_roles = {f"reward_p{share}/role{number}": 0.5 for number in range(64) for share in range(7)}
    trainer.finish(trainer.take(), skipped=False, figures=of_roles | {"loss": 1.0, "entropy": float("nan")})
    told = dict(trainer.script.acks[-1].metrics)
    assert (len(told), told["loss"], "entropy" in told) == (256, 1.0, False)


def test_the_ledger_names_what_a_step_trained_on(trainer: Trainer) -> None:
    trainer.finish(trainer.take(1), skipped=False)
    trainer.finish(trainer.take(2), skipped=True)
    first, second = trainer.lines()
    ids = [item.trajectory_id for item in batch_of(1).items]
    bound = {"step": 1, "epoch": 3, "batch_id": "b1", "digest": batch_of(1).digest.hex()}
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
