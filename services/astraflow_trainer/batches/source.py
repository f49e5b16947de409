"""Where a trainer's batches come from: BatchService, with the lease kept alive while a batch is in hand.

Invariant: a batch is used only under the epoch that claimed the policy, its intent is recorded before
training, and its ledger line is written before the ack, so that nothing acked is missing from the ledger; a
FENCED answer ends the trainer. Called by the training loop, from its thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from astraflow._contract.bounds import MAX_ENTRIES
from astraflow.client import Client, RetryPolicy
from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2
from astraflow.errors import AstraflowError, NotFoundError, PreconditionError, RetryableError
from astraflow.recipe import BatchSettings
from astraflow.training.accepting import BadBatch, bad_batch, fetch_bodies, group_of, quarantine
from astraflow.trajectories import BadTrajectory
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_kit.log_files import drop_cut_line, older
from astraflow_kit.unit_of_work import step_correlation, unit_of_work
from astraflow_trainer.batches.failed_steps import FailedSteps
from astraflow_trainer.batches.routing import ReadBlob
from astraflow_trainer.batches.rows import Group, TrainingRow, accepted_row
from astraflow_trainer.batches.stale import corrected

log = get_logger(__name__)

_LONG_POLL_S = 5.0
# Renewals come again, and the end of a trainer waits for nobody.
_SIGN_TIMEOUT_S, _ONCE = 5.0, RetryPolicy(total_s=0)
TRAINED = batch_service_pb2.BATCH_STAGE_TRAINED
SKIPPED = batch_service_pb2.BATCH_STAGE_SKIPPED
NOT_MEASURED = -1.0
"""What a trajectory that nothing was measured of has for its mismatch."""
RUN_FINISHED = "run_finished"
"""What the server says a batch waits for when there will be none."""
NOT_AHEAD = "not_ahead"
"""What it says when none can be read ahead now."""


@dataclass(frozen=True)
class Claim:
    """The server's answer to a claim."""

    epoch: int
    last_finished_step: int
    last_durable_step: int
    version: int | None
    """Newest announced version; None before the first."""
    batch_lease_s: float
    data_incarnation: str
    """Another one means that Redis was restarted since, and may have lost its last second."""
    identity: str = ""
    """Of the run that the server has; empty where an older release created it."""
    session: str = field(default="", repr=False)
    """Credential of this claim, a secret of the trainer's ranks."""


@dataclass(frozen=True)
class StepBatch:
    """A batch bound to a step, as the server has it. Its items, and the rows of them, are in the batch's own order."""

    bound: batch_pb2.Batch
    stage: batch_service_pb2.BatchStage.ValueType
    """What was acked of the step before."""

    @classmethod
    def of(cls, answer: batch_service_pb2.AcquireBatchResponse) -> StepBatch:
        """The batch of an answer that has one."""
        return cls(answer.batch, answer.stage)

    @property
    def finished_before(self) -> bool:
        """True when the step was acked before and is replayed now."""
        return self.stage in (TRAINED, SKIPPED)

    @property
    def skipped_before(self) -> bool:
        """True when it was acked as skipped."""
        return self.stage == SKIPPED

    def staleness(self) -> list[int]:
        """Versions between the step's base version and each trajectory's oldest token."""
        return [self.bound.base_version - item.min_version for item in self.bound.items]

    def staleness_parts(self) -> dict[str, float]:
        """Where the staleness of the batch arose, means: in flight while versions passed that sampled later tokens, in
        queue while versions passed that sampled none.
        """
        items, base = self.bound.items, self.bound.base_version
        if not items:
            return {"staleness_in_flight_mean": 0.0, "staleness_in_queue_mean": 0.0}
        return {
            "staleness_in_flight_mean": fmean(item.max_version - item.min_version for item in items),
            "staleness_in_queue_mean": fmean(base - item.max_version for item in items),
        }

    def rewards(self) -> dict[str, float]:
        """Quantiles of the rewards of the batch's trajectories."""
        rewards = [item.reward for item in self.bound.items] or [0.0]
        low, middle, high = np.quantile(rewards, (0.1, 0.5, 0.9)).tolist()
        return {"reward_p10": low, "reward_p50": middle, "reward_p90": high}

    def completions(self) -> dict[str, float]:
        """How many tokens the policy generated a trajectory, and the share of trajectories that a limit cut off."""
        items = self.bound.items
        lengths = np.array([item.num_trainable_tokens for item in items] or [0])
        middle, long, longest = np.quantile(lengths, (0.5, 0.9, 1.0), method="higher").tolist()
        return {
            "completion_tokens_mean": float(lengths.mean()),
            "completion_tokens_p50": middle,
            "completion_tokens_p90": long,
            "completion_tokens_max": longest,
            "truncated_fraction": fmean(item.truncated for item in items) if items else 0.0,
        }


@dataclass(frozen=True)
class Fetched:
    """Payloads of a batch as rows, in the order of its items."""

    rows: list[TrainingRow]
    num_bytes: int
    """Payload bytes that were received."""
    num_stale_tokens: int
    """Tokens that are masked or count for less."""
    problems: dict[Group, BadTrajectory]
    """Groups with a payload that cannot be trained on."""


class Ledger:
    """The trainer's own record of what it trained on: one JSON line per step, flushed to disk before going
    on. A line that a crash cut short is removed: its step was not acked.

    A file of `max_bytes` becomes the older one, `ledger.1.jsonl`, in place of the one before. Nothing resumes from
    it: steps are replayed from the server and the checkpoints, so what is old is for audits only.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 * 2**20) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        if num_bytes := drop_cut_line(path):
            log.warning("ledger.cut_line_dropped", path=str(path), num_bytes=num_bytes)

    def append(self, batch: StepBatch, *, epoch: int, stage: str) -> None:
        """Record that `batch` reached `stage`."""
        line = {
            "step": batch.bound.step,
            "epoch": epoch,
            "batch_id": batch.bound.batch_id,
            "digest": batch.bound.digest.hex(),
            "stage": stage,
            "trajectory_ids": [item.trajectory_id for item in batch.bound.items],
        }
        if self._path.exists() and self._path.stat().st_size >= self._max_bytes:
            self._path.replace(older(self._path, 1))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


class BatchSource:
    """Batches of one policy under one claimed epoch. Blocking; owned by the training thread, but for `read_ahead`,
    `fetch` and `kept_alive`, which the thread calls, too, that reads the next batch.
    """

    def __init__(
        self,
        client: Client,
        *,
        run_id: str,
        policy_id: str,
        trainer_id: str,
        ledger: Ledger,
        settings: BatchSettings | None = None,
        read_blob: ReadBlob | None = None,
        failed: FailedSteps | None = None,
    ) -> None:
        """`read_blob` reads what trajectories refer to, recorded experts; None leaves them out."""
        self.failed = failed
        self._client = client
        self._read_blob = read_blob
        self._settings = settings or BatchSettings()
        self._run_id = run_id
        self._policy_id = policy_id
        self._trainer_id = trainer_id
        self._ledger = ledger
        self.epoch = 0
        self.num_quarantined = 0
        """Batches that the latest `acquire` gave back, never to be bound again."""

    def claim(
        self,
        *,
        known_epoch: int = 0,
        held_epoch: int = 0,
        last_step: int = 0,
        accepted_loss: batch_service_pb2.AcceptedLoss | None = None,
    ) -> Claim:
        """Start a new epoch above `known_epoch`, fencing every older trainer of the policy.

        The run's training ends when all policies are at the `last_step` of their trainers; 0 says nothing. With
        `held_epoch` (after Redis lost data) raises FencedError when another trainer has a newer one. Waits
        for a server that is away: a claim whose answer was lost costs a number and nothing else. With `accepted_loss`
        the policy goes on after that step, which the server forgot.
        """
        request = batch_service_pb2.ClaimPolicyRequest(
            run_id=self._run_id,
            policy_id=self._policy_id,
            trainer_id=self._trainer_id,
            known_epoch=known_epoch,
            held_epoch=held_epoch,
            last_step=last_step,
            accepted_loss=accepted_loss,
        )
        response = self._client.call(self._client.batches.ClaimPolicy, request, harmless=True)
        claim = Claim(
            epoch=response.trainer_epoch,
            last_finished_step=response.last_finished_step,
            last_durable_step=response.last_durable_step,
            version=response.version if response.HasField("version") else None,
            batch_lease_s=response.batch_lease_duration.ToNanoseconds() / 1e9,
            data_incarnation=response.data_incarnation,
            identity=response.identity,
            session=response.session,
        )
        self.adopt(claim)
        return claim

    def adopt(self, claim: Claim) -> None:
        """Act under a claim, which the first rank made for all."""
        self.epoch, self._client.session = claim.epoch, claim.session

    @property
    def _held(self) -> dict[str, Any]:
        """The policy and the epoch that it is held under, as every request names them."""
        return {"run_id": self._run_id, "policy_id": self._policy_id, "trainer_epoch": self.epoch}

    def require_epoch(self, step: int) -> None:
        """Ask the server about this epoch. Raises FencedError, naming the trainer that has a newer one."""
        request = batch_service_pb2.RenewBatchRequest(**self._held, step=step)
        # Nothing is bound to that step any more, perhaps: the answer about the epoch is what counts.
        with contextlib.suppress(NotFoundError):
            self._client.call(self._client.batches.RenewBatch, request)

    def unit_of_work(self, step: int) -> AbstractContextManager[None]:
        """Log and call under the step's correlation id inside the block."""
        return unit_of_work(step_correlation(self._policy_id, step), step=step)

    def acquire(
        self, step: int, *, base_version: int, waiting: Callable[[str], None], stopped: Callable[[], bool]
    ) -> StepBatch | None:
        """Return the batch of `step`, waiting until there is one; None when `stopped` says so first.

        `waiting` is called with the server's reason after each empty poll. A batch that is not what it says is
        quarantined, and another one waited for. Raises FencedError when a newer epoch exists, InternalError when
        several batches are of no use in turn, or one that was trained on is not what it says any more,
        InvalidArgumentError when the step of one that was trained on fails now.
        """
        request = batch_service_pb2.AcquireBatchRequest(
            **self._held,
            step=step,
            base_version=base_version,
            wait_duration=Duration(seconds=int(_LONG_POLL_S)),
        )
        self.num_quarantined = 0
        while not stopped():
            response = self._client.call(
                self._client.batches.AcquireBatch, request, timeout_s=_LONG_POLL_S + 10.0
            )
            if not response.HasField("batch"):
                waiting(response.waiting_for or "ready_groups")
                continue
            batch = StepBatch.of(response)
            problem = bad_batch(batch.bound, policy_id=self._policy_id, step=step)
            if problem is None and self.failed is not None:
                problem = self.failed.problem(batch.bound, was_trained=batch.finished_before)
            if problem is None:
                return batch
            self._quarantine(batch, problem, step=step)
        return None

    def read_ahead(self, step: int, *, base_version: int, stopped: Callable[[], bool]) -> StepBatch | None:
        """Return the batch of the step after the one in hand, waiting until there is one; None when `stopped` says so
        first, when none can be read ahead, and for one that is not what it says, which `acquire` quarantines.

        Raises FencedError when a newer epoch exists.
        """
        request = batch_service_pb2.AcquireBatchRequest(
            **self._held,
            step=step,
            base_version=base_version,
            wait_duration=Duration(seconds=int(_LONG_POLL_S)),
            read_ahead=True,
        )
        acquire, timeout_s = self._client.batches.AcquireBatch, _LONG_POLL_S + 10.0
        while not stopped():
            response = self._client.call(acquire, request, timeout_s=timeout_s)
            if response.HasField("batch"):
                batch = StepBatch.of(response)
                is_good = bad_batch(batch.bound, policy_id=self._policy_id, step=step) is None
                failpoints.hit("trainer.read_ahead")
                return batch if is_good else None
            if response.waiting_for in (NOT_AHEAD, RUN_FINISHED):
                return None
        return None

    def give_back(self, batch: StepBatch) -> None:
        """Return the groups of a batch that was read ahead and will not be trained on here."""
        step, batch_id = batch.bound.step, batch.bound.batch_id
        request = batch_service_pb2.NackBatchRequest(
            **self._held, step=step, reason="trainer_ended", batch_id=batch_id
        )
        self._client.call(self._client.batches.NackBatch, request)

    def _quarantine(self, batch: StepBatch, problem: BadBatch, *, step: int) -> None:
        """Give a batch back for good. Raises InternalError where another one would not help."""
        log.error(
            "batch.quarantined", batch_id=batch.bound.batch_id, reason=problem.slug, detail=problem.detail
        )
        quarantine(
            self._client,
            self._held,
            batch.bound,
            problem,
            step=step,
            was_trained=batch.finished_before,
            num_before=self.num_quarantined,
        )
        self.num_quarantined += 1

    def record_intent(self, batch: StepBatch) -> None:
        """Tell the server, before training, what the step will train on. Harmless for a replayed step."""
        if not batch.finished_before:
            self._ack(batch, batch_service_pb2.BATCH_STAGE_INTENT)
        failpoints.hit("trainer.intent_recorded")

    def fetch(self, batch: StepBatch, *, items: Sequence[batch_pb2.BatchItem] | None = None) -> Fetched:
        """Return the rows of `items`, some of the batch's, in their order; None means all of them.

        One whose payload is gone, or is not what its item says, is missing: `problems` has it.
        """
        wanted = batch.bound.items if items is None else items
        bodies = fetch_bodies(self._client, self._held, step=batch.bound.step, items=wanted)
        num_bytes, base_version = sum(map(len, bodies.values())), batch.bound.base_version
        rows: list[TrainingRow] = []
        problems: dict[Group, BadTrajectory] = {}
        num_stale_tokens = 0
        for item in wanted:
            try:
                row = accepted_row(
                    item,
                    bodies.pop(item.trajectory_id, None),
                    base_version=base_version,
                    read_blob=self._read_blob,
                )
            except BadTrajectory as problem:
                problems.setdefault(group_of(item), problem)
                continue
            num_stale = 0
            # What is replayed on purpose has a bound of its own.
            if not item.use:
                row, num_stale = corrected(row, base_version=base_version, settings=self._settings)
            rows.append(row)
            num_stale_tokens += num_stale
        return Fetched(rows, num_bytes, num_stale_tokens, problems)

    def finish(
        self,
        batch: StepBatch,
        *,
        skipped: bool,
        mismatch_kl: Sequence[float] = (),
        figures: Mapping[str, float] | None = None,
    ) -> bool:
        """Record, in the ledger and at the server, that the optimizer step was taken or skipped. `mismatch_kl` is of
        each item of the batch, in its order; the server keeps `figures` as the policy's series.

        Returns whether it counts as skipped: for a replayed step that is what was recorded the first time.
        """
        failpoints.hit("trainer.step_taken")
        if batch.finished_before and skipped is not batch.skipped_before:
            log.warning("step.replayed_otherwise", skipped=skipped, skipped_before=batch.skipped_before)
            skipped = batch.skipped_before
        self._ledger.append(batch, epoch=self.epoch, stage="SKIPPED" if skipped else "TRAINED")
        if not batch.finished_before:
            measured = () if skipped else mismatch_kl
            try:
                stage = SKIPPED if skipped else TRAINED
                self._ack(batch, stage, mismatch_kl=measured, figures=figures)
            except PreconditionError as error:
                if error.metadata.get("lacks") != "intent":
                    raise
                # Redis lost its last second, and in it the intent; the batch is still bound.
                self._ack(batch, batch_service_pb2.BATCH_STAGE_INTENT)
                self._ack(batch, TRAINED, mismatch_kl=measured, figures=figures)
        failpoints.hit("trainer.step_acked")
        return skipped

    def mark_durable(self, step: int) -> None:
        """A checkpoint covers every step up to `step`: the server may release their payloads."""
        request = batch_service_pb2.MarkDurableRequest(**self._held, step=step)
        with self.unit_of_work(step):
            self._client.call(self._client.batches.MarkDurable, request)

    def release(self, *, doubt: str = "") -> None:
        """Say that this trainer ends; `doubt` is why it does not go on from what the server knows."""
        request = batch_service_pb2.ReleasePolicyRequest(**self._held, doubt=doubt)
        try:
            self._client.call(
                self._client.batches.ReleasePolicy, request, timeout_s=_SIGN_TIMEOUT_S, retry=_ONCE
            )
        except AstraflowError as error:
            # Fenced, or the server has ended, too: who asks later waits for a lease time at most.
            log.info("policy.not_released", reason=error.reason, message=error.message)

    @contextmanager
    def kept_alive(self, batch: StepBatch, *, lease_s: float) -> Iterator[None]:
        """Renew the batch's lease in the background while the block runs."""
        renew = partial(self._renew, batch.bound.step)
        with _in_background(renew, period_s=max(0.2, lease_s / 3), name="batch-lease"):
            yield

    def _renew(self, step: int) -> bool:
        request = batch_service_pb2.RenewBatchRequest(**self._held, step=step)
        try:
            with self.unit_of_work(step):
                self._client.call(
                    self._client.batches.RenewBatch, request, timeout_s=_SIGN_TIMEOUT_S, retry=_ONCE
                )
        except RetryableError as error:
            # Expiry only raises an alarm at the server; the next renewal, or the ack, will show it.
            log.warning("batch.renewal_failed", step=step, reason=error.reason)
        except AstraflowError as error:
            # Fenced, most likely: the training thread hears the same from its next call, and raises it.
            log.warning("batch.renewal_refused", step=step, reason=error.reason, message=error.message)
            return False
        return True

    def _ack(
        self,
        batch: StepBatch,
        stage: batch_service_pb2.BatchStage.ValueType,
        *,
        mismatch_kl: Sequence[float] = (),
        figures: Mapping[str, float] | None = None,
    ) -> None:
        self._client.call(
            self._client.batches.AckBatch,
            batch_service_pb2.AckBatchRequest(
                **self._held,
                step=batch.bound.step,
                batch_id=batch.bound.batch_id,
                digest=batch.bound.digest,
                stage=stage,
                mismatch_kl=mismatch_kl,
                metrics=ack_figures(figures or {}),
            ),
        )


def ack_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a step that its ack can carry, finite ones and at most MAX_ENTRIES: where many roles or
    baselines (`NAME/OF`) make more, theirs are left out first.
    """
    finite = [(name, value) for name, value in figures.items() if math.isfinite(value)]
    return dict(sorted(finite, key=lambda figure: "/" in figure[0])[:MAX_ENTRIES])


@contextmanager
def _in_background(call: Callable[[], bool], *, period_s: float, name: str) -> Iterator[None]:
    """Call again and again in a thread while the block runs, until `call` says that it is of no use."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(period_s) and call():
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
