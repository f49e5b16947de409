"""How long publishing and checkpoints keep the training thread from the next step.

Invariant: it is the trainer's own loop, learner and publishing thread, over a store of files; only batches are there at
once, and the server's answers are left out. Called by `experiment`; `prefetch` runs the same loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2
from astraflow.recipe import ResolvedPolicy
from astraflow.recipe.file import parse_recipe
from astraflow_bench.figures import Figure
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import geometric_lengths, model_shape, one_rank, rows_of
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.batches.source import Claim, StepBatch
from astraflow_trainer.controls import Controls
from astraflow_trainer.learner import PolicyLearner
from astraflow_trainer.loop import LoopSettings, TrainingLoop
from astraflow_trainer.model.model import build_causal_lm, save_causal_lm
from astraflow_trainer.progress import Progress
from astraflow_trainer.publish.publishing import PublishWorker
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.step.step import Outcome, StepMetrics
from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store import open_store

if TYPE_CHECKING:
    from astraflow_trainer.batches.rank_batches import RankBatches

_MOST_BLOCKED = 5.0
_CHECKPOINT_EVERY = 2
_RUN, _POLICY = "bench", "solver"
_RECIPE = """
run: {name: bench, dataset: "recipe:None", steps: 1}
policies: {solver: {model: {path: model}, sampling: {max_new_tokens: 8}}}
raas: {reward: "astraflow_raas.rewards.boxed_match:BoxedMatch"}
"""


class _SameRows:
    """`RankBatches` that always have a batch, without a server."""

    def __init__(self, rows: Sequence[TrainingRow]) -> None:
        self._rows = rows
        self.num_left_out = 0

    def unit_of_work(self, _step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def acquire(self, step: int, **_: Any) -> StepBatch:
        return StepBatch(batch_pb2.Batch(step=step), batch_service_pb2.BATCH_STAGE_UNSPECIFIED)

    def kept_alive(self, _batch: StepBatch, *, lease_s: float) -> AbstractContextManager[None]:
        del lease_s
        return nullcontext()

    def trying(self, _batch: StepBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def record_intent(self, _batch: StepBatch) -> None:
        """Nobody asks."""

    def fetch(self, _batch: StepBatch) -> list[TrainingRow]:
        return list(self._rows)

    def read_ahead(self, _step: int, *, base_version: int) -> None:
        """It is there already."""

    def end_read_ahead(self, *, gives_back: bool) -> None:
        """Nothing was read."""

    def finish(self, _batch: StepBatch, *, skipped: bool, **_: Any) -> bool:
        return skipped

    def mark_durable(self, _step: int) -> None:
        """Nobody asks."""

    def measured(self) -> dict[str, float]:
        return {}


class _TimedLearner(PolicyLearner):
    """Notes when each step began and ended, by the clock."""

    times_s: list[tuple[float, float]]

    def train(self, rows: Sequence[TrainingRow]) -> StepMetrics:
        """Take a step."""
        started = time.monotonic()
        metrics = super().train(rows)
        assert metrics.outcome is Outcome.COMMITTED, metrics.skip_reason
        self.times_s.append((started, time.monotonic()))
        return metrics


def measure_blocking(sizes: TrainerSizes, folder: Path) -> list[Figure]:
    """The time between two steps, after a publication, and after one with a checkpoint."""
    policy = parse_recipe(_RECIPE).recipe.policy(_POLICY)
    rows = rows_of(geometric_lengths(sizes.rows, median=sizes.median))
    times_s = run_loop(sizes, folder, cast("RankBatches", _SameRows(rows)))
    return _figures(times_s, checkpoint_every_steps=policy.trainer.checkpoint_every_steps)


def run_loop(
    sizes: TrainerSizes, folder: Path, batches: RankBatches, *, progress: Progress | None = None
) -> list[tuple[float, float]]:
    """One step more than the sizes say, on these batches, each published: beginning and end of each by the clock."""
    policy = parse_recipe(_RECIPE).recipe.policy(_POLICY)
    learner = _learner(policy, sizes, folder)
    writer = VersionWriter.open(
        open_store((folder / "store").as_uri()), run_id=_RUN, policy_id=_POLICY, epoch=1
    )
    publisher = ShardPublisher(
        writer,
        uploads=writer.uploads,
        peers=OnePeer(),
        base=None,
        encode_threads=policy.trainer.publish.encode_threads,
    )
    worker = PublishWorker(
        publisher,
        None,
        policy_id=_POLICY,
        max_behind=policy.trainer.publish.max_behind,
        published=lambda _: None,
    )
    with worker:
        worker.submit(0, learner.published_bytes())
        worker.wait_until_done()
        _loop(learner, worker, batches, progress or Progress(), num_steps=sizes.steps + 1)
    return learner.times_s


def _learner(policy: ResolvedPolicy, sizes: TrainerSizes, folder: Path) -> _TimedLearner:
    model_dir = folder / "model"
    model_dir.mkdir()
    save_causal_lm(build_causal_lm(model_shape(sizes), seed=0), model_dir)
    learner = _TimedLearner(
        policy,
        plugins=StepPlugins(),
        model_dir=model_dir,
        checkpoint_dir=folder / "checkpoints",
        group=one_rank(),
    )
    learner.times_s = []
    return learner


def _loop(
    learner: PolicyLearner,
    worker: PublishWorker,
    batches: RankBatches,
    progress: Progress,
    *,
    num_steps: int,
) -> None:
    TrainingLoop(
        source=batches,
        learner=learner,
        publisher=worker,
        progress=progress,
        claim=Claim(
            epoch=1,
            last_finished_step=0,
            last_durable_step=0,
            version=0,
            batch_lease_s=60.0,
            data_incarnation="",
        ),
        controls=Controls(),
    ).run(
        LoopSettings(
            first_step=1,
            version=0,
            last_step=num_steps,
            published={0: 0},
            checkpoint_every_steps=_CHECKPOINT_EVERY,
            checkpoint_every_s=86_400.0,
        )
    )


def _figures(times_s: Sequence[tuple[float, float]], *, checkpoint_every_steps: int) -> list[Figure]:
    """`times_s` are beginning and end of each step. Steps with even numbers are followed by a checkpoint."""
    step_s = fmean(ended - started for started, ended in times_s)
    gaps_s = [after - ended for (_, ended), (after, _) in pairwise(times_s)]
    publish_s = fmean(gaps_s[::_CHECKPOINT_EVERY])
    checkpoint_s = max(0.0, fmean(gaps_s[1::_CHECKPOINT_EVERY]) - publish_s)
    share = partial(Figure, what="training thread blocked", unit="% of a step's time")
    return [
        Figure(what="a step of the loop", subject="by the clock", value=step_s, unit="s"),
        share(subject="by a publication", value=100 * publish_s / step_s),
        share(subject="by a checkpoint", value=100 * checkpoint_s / step_s),
        share(
            subject=f"by both, a checkpoint every {checkpoint_every_steps} steps",
            value=100 * (publish_s + checkpoint_s / checkpoint_every_steps) / step_s,
            most=_MOST_BLOCKED,
        ),
    ]
