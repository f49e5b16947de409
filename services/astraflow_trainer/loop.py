"""The training loop: acquire, intent, pack and train, ack, publish, checkpoint, mark durable.

Invariant: the order above holds for every step; publishing runs beside the next step, at most `max_behind`
versions behind, a checkpoint is written beside it too, after the versions of all steps it covers are announced, and a
step's payloads are released only after that. While a step computes, the batch of the next one is read ahead; it is
acquired in its turn all the same, and what was read is used where it is the same batch. After a restart the loop
replays the retained batches from the checkpoint on, verbatim, and continues. What operators ask is done between two
steps. Every rank runs it alike; `RankBatches` lets the first one decide. `session` runs it in the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from astraflow.dataflow.v1 import batch_pb2
from astraflow.errors import PreconditionError, UnavailableError
from astraflow_kit import traces
from astraflow_kit.log import get_logger
from astraflow_trainer.batches.rank_batches import RankBatches
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.batches.source import Claim, StepBatch
from astraflow_trainer.batches.traced import link_tasks, record_trained
from astraflow_trainer.checkpoint_worker import CheckpointWorker
from astraflow_trainer.controls import Controls, Orders, RateChange
from astraflow_trainer.progress import Phase, Progress, StepRecord
from astraflow_trainer.publish.publishing import PUBLISH, ModelBytes, PublishWorker
from astraflow_trainer.step.step import Outcome, SkipReason, StepMetrics

log = get_logger(__name__)


_Blocking: TypeAlias = Literal["publish_copy_s", "publish_wait_s", "checkpoint_copy_s", "checkpoint_wait_s"]
"""Copying, or waiting until enough versions are published or until the checkpoint before is written."""


Archived: TypeAlias = Callable[[batch_pb2.Batch, Mapping[str, NDArray[np.float32]]], None]
"""Keeps the log-probs of a batch."""


@dataclass
class _Blocked:
    """How long publishing and checkpoints held up the training thread since the record of the last step."""

    by_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def by(self, what: _Blocking) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.by_s[what] += time.monotonic() - started

    def __post_init__(self) -> None:
        self.taken()

    def taken(self) -> dict[str, float]:
        """The figures of a step; counting begins anew."""
        by_s, self.by_s = self.by_s, dict.fromkeys(get_args(_Blocking), 0.0)
        totals = {
            f"{path}_blocked_s": sum(held_s for what, held_s in by_s.items() if what.startswith(path))
            for path in ("publish", "checkpoint")
        }
        return by_s | totals


class Learner(Protocol):
    """Model, optimizer and checkpoints of one policy, as the loop sees them."""

    def train(self, rows: Sequence[TrainingRow]) -> StepMetrics:
        """Take one optimizer step on `rows`, or skip it."""

    def published_bytes(self) -> ModelBytes:
        """Return a copy of this rank's weights as they are published; it does not change until released."""

    def stage(self, *, step: int, version: int) -> Callable[[], object]:
        """Copy what a resume after `step` needs; what is returned makes that durable, in another thread. A checkpoint
        of the step that exists learns the learning rate.
        """

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of the next step."""

    def set_learning_rate(self, peak: float) -> None:
        """Change the peak from the next step on; checkpoints hold it."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Bounds of one run of the loop."""

    first_step: int
    """Step to take first: one after the loaded checkpoint's."""
    version: int
    """Version of the weights that the first step starts from."""
    last_step: int
    published: Mapping[int, int]
    """Step to the newest version it has in the store. Of replayed steps only the newest of these publishes."""
    checkpoint_every_steps: int
    checkpoint_every_s: float
    num_damaged: int = 0
    """Damaged checkpoints that were put aside at the start; the first step's metrics say so."""


class TrainingLoop:
    """One policy's loop. Blocking; run it in a thread, steer it through its `Controls`."""

    def __init__(
        self,
        *,
        source: RankBatches,
        learner: Learner,
        publisher: PublishWorker,
        progress: Progress,
        claim: Claim,
        controls: Controls,
        archived: Archived = lambda batch, logprobs: None,
        released: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`archived` gets each batch, with the log-probs that its metrics have, and returns at once. `released` gets
        the version of each durable checkpoint, from which all that follows starts; called in the thread that wrote it.
        """
        self._archived, self._released = archived, released
        self._source = source
        self._learner = learner
        self._publisher = publisher
        self._progress = progress
        self._claim = claim
        self._controls = controls
        self._published: Mapping[int, int] = {}
        self._newest = 0
        self._blocked = _Blocked()
        self._checkpoints = CheckpointWorker(publisher, durable=self._durable)
        self._num_damaged = self._last_step = 0
        self._saved_s = 0.0
        """When the newest checkpoint was made, by the monotonic clock."""

    def run(self, settings: LoopSettings) -> None:
        """Train to the last step, or until stopped; returns when everything is published and checkpointed."""
        try:
            with self._checkpoints:
                step = self._run(settings)
        except BaseException as error:
            self._source.end_read_ahead(gives_back=False)
            self._controls.ended(UnavailableError(f"the trainer is ending: {error}"))
            raise
        self._controls.ended(PreconditionError(f"the trainer has ended after step {step}"))

    def _run(self, settings: LoopSettings) -> int:
        version, step = settings.version, settings.first_step - 1
        # A process that died with its checkpoint written had not told the server yet.
        saved = min(step, self._claim.last_durable_step)
        self._saved_s = time.monotonic()
        self._progress.resumed(durable_step=saved, learning_rate=self._learner.learning_rate)
        self._published = settings.published
        self._num_damaged, self._last_step = settings.num_damaged, settings.last_step
        self._newest = max(settings.version, *settings.published.values(), 0)
        known_step = max(*settings.published, self._claim.last_finished_step)
        # A wish to stop is seen in `_take`: the first rank decides there, the others hear of it.
        while step < settings.last_step:
            self._controls.at(step, replaying=step < known_step)
            if step > saved and time.monotonic() - self._saved_s >= settings.checkpoint_every_s:
                self._controls.checkpoint_due()
            with self._source.unit_of_work(step + 1):
                taken = self._take(step + 1)
            if isinstance(taken, Orders):
                if taken.stop:
                    break
                saved = self._obey(taken, step=step, version=version)
                continue
            step += 1
            version = version if taken.version is None else taken.version
            self._progress.stepped(taken)
            if step % settings.checkpoint_every_steps == 0:
                saved = self._begin_checkpoint(step, version=version)
        self._progress.ended(Phase.STOPPING)
        self._source.end_read_ahead(gives_back=True)
        self._checkpoints.wait(waiting=self._say_what_fails)
        if step > saved:
            self._checkpoint(step, version=version)
        # Nobody else would announce the last version again to a server that forgot it.
        self._publisher.announce_again()
        self._publisher.wait_until_done(waiting=self._say_what_fails)
        self._controls.checkpointed(step)
        self._progress.ended(Phase.FINISHED)
        return step

    def _obey(self, orders: Orders, *, step: int, version: int) -> int:
        """Set the learning rate, if one was asked for, and make a checkpoint that holds it."""
        if orders.checkpoint_due and not orders.checkpoint and orders.learning_rate is None:
            return self._begin_checkpoint(step, version=version)
        previous = self._learner.learning_rate
        if orders.learning_rate is not None:
            self._learner.set_learning_rate(orders.learning_rate)
            log.info("learning_rate.set", previous=previous, peak=orders.learning_rate, first_step=step + 1)
        saved = self._checkpoint(step, version=version)
        if orders.learning_rate is not None:
            self._progress.learning_rate(orders.learning_rate)
            self._controls.learning_rate_set(
                orders.learning_rate, RateChange(first_step=step + 1, previous=previous)
            )
        return saved

    def _publish(self, batch: StepBatch) -> int:
        """Queue the weights after the batch's step and return the number they have, or will get."""
        newest_step = max(self._published, default=0)
        if batch.finished_before and batch.bound.step < newest_step and batch.bound.step in self._published:
            return self._published[batch.bound.step]
        with self._blocked.by("publish_copy_s"), self._progress.computing():
            model = self._learner.published_bytes()
        self._publisher.submit(batch.bound.step, model)
        if batch.bound.step > newest_step:
            self._newest += 1
            return self._newest
        # Equal bytes have their number already; others (a GPU's rounding, other groups after Redis lost the
        # batch) get the next one.
        with self._blocked.by("publish_wait_s"):
            self._publisher.wait_until_done(waiting=self._say_what_fails)
        number = self._progress.state.version or 0
        self._newest = max(self._newest, number)
        return number

    def _say_what_fails(self) -> None:
        """Called while a checkpoint waits for versions: the trainer counts as working unless the store fails."""
        if self._publisher.waits_for != PUBLISH:
            self._progress.waiting(self._publisher.waits_for)

    def _waiting(self, reason: str) -> None:
        """Called after each empty poll. An announcement that Redis lost could be what the nodes wait for."""
        self._progress.waiting(reason)
        self._publisher.announce_again()

    def _take(self, step: int) -> StepRecord | Orders:
        """Wait for the step's batch and train on it, unless something else was asked for first."""
        with traces.span("step", {"astraflow.step": step}) as recorded:
            started = time.monotonic()
            batch_from, batch = self._awaited(step)
            if isinstance(batch, Orders):
                return batch
            link_tasks(recorded, batch.bound, run=self._claim.identity)
            return self._trained(step, batch, started=started, batch_from=batch_from)

    def _awaited(self, step: int) -> tuple[float, StepBatch | Orders]:
        """When the wait for the step's batch began, by the monotonic clock, and what ended it."""
        self._checkpoints.raise_failure()
        self._progress.waiting(PUBLISH)
        with self._blocked.by("publish_wait_s"):
            self._publisher.wait_for_room(waiting=lambda: self._progress.waiting(self._publisher.waits_for))
        self._progress.waiting("batch")
        batch_from = time.monotonic()
        with traces.span("acquire"):
            return batch_from, self._source.acquire(
                step, base_version=self._newest, waiting=self._waiting, controls=self._controls
            )

    def _trained(self, step: int, batch: StepBatch, *, started: float, batch_from: float) -> StepRecord:
        with self._source.kept_alive(batch, lease_s=self._claim.batch_lease_s), self._source.trying(batch):
            self._source.record_intent(batch)
            with traces.span("fetch"):
                rows = self._source.fetch(batch)
            if step < self._last_step:
                # A step that is replayed here has its version already; what follows it is bound, or not read ahead.
                self._source.read_ahead(step + 1, base_version=self._newest + 1)
            self._progress.training()
            trained_from, began_s = time.monotonic(), time.time()
            with self._progress.computing(), traces.span("train"):
                metrics = self._learner.train(rows)
            named = self._figures(metrics, batch, batch_wait_s=trained_from - batch_from)
            so_far = {"wait_s": trained_from - started, "train_s": time.monotonic() - trained_from}
            skipped = self._source.finish(
                batch,
                skipped=metrics.outcome is Outcome.SKIPPED,
                mismatch_kl=metrics.mismatch_kl,
                figures={**named, **self._blocked.by_s, **so_far},
            )
        self._archived(batch.bound, metrics.logprobs)
        version = None if skipped else self._publish(batch)
        self._num_damaged = 0
        record_trained(batch.bound, run=self._claim.identity, version=version, began_s=began_s)
        log.info(
            "step.finished",
            batch_id=batch.bound.batch_id,
            version=version,
            reward_mean=round(metrics.reward_mean, 4),
            num_trajectories=metrics.num_rows,
        )
        return StepRecord(
            step=step,
            version=version,
            finished_at_s=time.time(),
            wait_s=trained_from - started,
            train_s=time.monotonic() - trained_from,
            metrics={**named, **self._blocked.taken()},
        )

    def _figures(self, metrics: StepMetrics, batch: StepBatch, *, batch_wait_s: float) -> dict[str, float]:
        """What a step measured, by name."""
        return _named(metrics, batch, num_unread=self._source.num_left_out) | {
            "damaged_checkpoints": float(self._num_damaged),
            "batch_wait_s": batch_wait_s,
            **self._source.measured(),
        }

    def _checkpoint(self, step: int, *, version: int) -> int:
        """Checkpoint, and return when the server may release what it covers."""
        self._begin_checkpoint(step, version=version)
        with self._blocked.by("checkpoint_wait_s"):
            self._checkpoints.wait(waiting=self._say_what_fails)
        self._controls.checkpointed(step)
        return step

    def _begin_checkpoint(self, step: int, *, version: int) -> int:
        """Copy what a checkpoint holds, once the one before is written; the rest is done beside the next steps."""
        with self._blocked.by("checkpoint_wait_s"):
            self._checkpoints.wait(waiting=self._say_what_fails)
        with self._blocked.by("checkpoint_copy_s"), self._progress.computing():
            write = self._learner.stage(step=step, version=version)
        self._checkpoints.submit(step, version=version, write=write)
        self._controls.checkpoint_begun()
        self._saved_s = time.monotonic()
        return step

    def _durable(self, step: int, version: int) -> None:
        """A checkpoint is written: let the server release what it covers. Called in the worker's thread."""
        self._source.mark_durable(step)
        self._released(version)
        log.info("checkpoint.durable", step=step, version=version)
        self._progress.durable(step)


def _named(metrics: StepMetrics, batch: StepBatch, *, num_unread: int) -> dict[str, float]:
    """Flatten what is worth a curve into named numbers."""
    staleness = batch.staleness()
    named = {
        "reward_mean": metrics.reward_mean,
        "overlong_penalty_mean": metrics.overlong_penalty_mean,
        "num_updates": float(metrics.num_updates),
        "grad_norm": metrics.gradient_norm,
        "learning_rate": metrics.learning_rate,
        "clip_low": metrics.clip_low,
        "clip_high": metrics.clip_high,
        "num_trajectories": float(metrics.num_rows),
        "num_trained_trajectories": float(metrics.num_trained_rows),
        "num_left_out_trajectories": float(metrics.num_left_out + num_unread),
        "num_groups": float(metrics.num_groups),
        "num_zero_variance_groups": float(metrics.num_zero_variance_groups),
        "num_tokens": float(sum(item.num_tokens for item in batch.bound.items)),
        **batch.completions(),
        **batch.rewards(),
        **batch.staleness_parts(),
        "staleness_mean": fmean(staleness) if staleness else 0.0,
        "staleness_max": float(max(staleness, default=0)),
        "skipped": float(metrics.outcome is Outcome.SKIPPED),
        "skipped_no_signal": float(metrics.skip_reason is SkipReason.NO_SIGNAL),
        "skipped_critic_warmup": float(metrics.skip_reason is SkipReason.CRITIC_WARMUP),
    }
    named |= {**metrics.of_roles, **metrics.of_critic}
    loss = metrics.loss
    if loss is not None:
        named |= {field.name: float(getattr(loss, field.name)) for field in fields(loss)}
    return named
