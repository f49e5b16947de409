"""Where a trainer goes on: at its newest checkpoint, from the weights that an operator went back to, or from published
weights in place of a damaged checkpoint.

Invariant: weights that a rollback gave up are never trained on or published again. The steps that were taken stay
taken: the trainer goes on with the step after the last finished one, from the newest published weights, with the
optimizer of a checkpoint of these very weights if there is one. Every rank calls it, the first one decides; the
session carries on from what it returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from astraflow_kit.log import get_logger
from astraflow_trainer.model.checkpoint import Position
from astraflow_weights.codec.peers import Peers
from astraflow_weights.codec.shards import ShardedModel
from astraflow_weights.errors import CorruptPart
from astraflow_weights.publish.agreement import on_first_rank
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import CommittedVersion

log = get_logger(__name__)


class Resumable(Protocol):
    """The learner, as far as taking up goes."""

    def positions(self) -> list[Position]:
        """Where the checkpoints stand, ascending by step."""

    def restore(self, *, at_most: int | None = None) -> Position | None:
        """Load the newest checkpoint, at step `at_most` or before; None when there is none."""

    def go_back(
        self,
        weights: ShardedModel,
        *,
        step: int,
        checkpoint: int | None,
        learning_rate: float | None,
        baselines: Mapping[str, float],
    ) -> None:
        """Take up published weights, with the optimizer of a checkpoint or a fresh one."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Last finished step, and the version of the weights to go on from."""

    step: int
    version: int
    went_back: bool = False
    """These are not the weights after `step`: make a checkpoint before anything else, nothing is replayed."""


@dataclass(frozen=True, kw_only=True)
class PublishedStart:
    """Published weights to go on from, where no checkpoint of them and their optimizer can be had."""

    step: int
    """Go on after this one."""
    version: int
    """Newest version, whose weights to take up."""
    rollback_of: int | None
    """The version that an operator went back to; None where a damaged checkpoint is made up for."""
    checkpoint: int | None
    """Step of the checkpoint that holds exactly these weights."""
    learning_rate: float | None
    """Peak that an operator had set."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Running baselines of that checkpoint, else of the newest one: they never start from 0 again."""


def take_up(
    learner: Resumable,
    publisher: ShardPublisher,
    *,
    peers: Peers,
    finished_step: int,
    durable_step: int,
    num_damaged: int = 0,
) -> Start:
    """Load what to go on from; a collective. `finished_step` and `durable_step` are the server's, `num_damaged` is how
    many checkpoints the first rank put aside.
    """

    def decide() -> PublishedStart | None:
        positions = [position for position in learner.positions() if position.step <= finished_step]
        versions = publisher.committed_since(None)
        back = pending_rollback(versions, positions, durable_step=durable_step, finished_step=finished_step)
        if back is not None or not num_damaged:
            return back
        return in_place_of_damaged(
            versions, positions, durable_step=durable_step, finished_step=finished_step
        )

    back = on_first_rank(
        peers,
        decide,
        encode=lambda found: None if found is None else asdict(found),
        decode=lambda content: None if content is None else PublishedStart(**content),
    )
    if back is None:
        position = learner.restore(at_most=finished_step)
        return Start(step=position.step, version=position.version) if position else Start(step=0, version=0)
    learner.go_back(
        _newest_weights(publisher, version=back.version),
        step=back.step,
        checkpoint=back.checkpoint,
        learning_rate=back.learning_rate,
        baselines=back.baselines,
    )
    log.warning(
        "policy.went_back" if back.rollback_of is not None else "checkpoint.made_up_for",
        version=back.version,
        rollback_of=back.rollback_of,
        step=back.step,
        optimizer="fresh" if back.checkpoint is None else f"of the checkpoint of step {back.checkpoint}",
    )
    return Start(step=back.step, version=back.version, went_back=True)


def _newest_weights(publisher: ShardPublisher, *, version: int) -> ShardedModel:
    """This rank's shards of the newest version. Raises CorruptPart when it cannot be had."""
    if publisher.kept.newest is None:
        raise CorruptPart(
            f"version {version} is what to go on from, but parts of it are missing from the store and no checkpoint "
            "holds its weights; restore the store's parts from a copy"
        )
    return publisher.kept.newest.shards


def pending_rollback(
    versions: Sequence[CommittedVersion],
    positions: Sequence[Position],
    *,
    durable_step: int,
    finished_step: int,
) -> PublishedStart | None:
    """The newest rollback when it came after the newest checkpoint; None: go on from that. Pure.

    Where versions were trained from the rollback since, their checkpoint is missing: that is for the caller to
    complain of, unless the server still has every batch since the checkpoint that is there.
    """
    rollbacks = [version for version in versions if version.rollback_of is not None]
    step, version = (positions[-1].step, positions[-1].version) if positions else (0, -1)
    if not rollbacks or version >= rollbacks[-1].version:
        return None
    newest, back = versions[-1], rollbacks[-1]
    if newest is not back and step < durable_step:
        return None
    return _start(versions, positions, step=finished_step, rollback_of=back.rollback_of)


def in_place_of_damaged(
    versions: Sequence[CommittedVersion],
    positions: Sequence[Position],
    *,
    durable_step: int,
    finished_step: int,
) -> PublishedStart | None:
    """The newest version where checkpoints are damaged and the batches since the newest good one were released; None
    where that one will do, or where the newest version is not of a step that the server knows. Pure.

    A checkpoint is made after the versions of all steps that it covers, so the store has the weights of each step that
    was ever durable; what is lost is the optimizer's memory of the steps since the older checkpoint.
    """
    held = positions[-1].step if positions else 0
    newest = versions[-1] if versions else None
    if held >= durable_step or newest is None or newest.step > finished_step:
        return None
    # Steps without a version since (skipped ones) changed no weights.
    return _start(versions, positions, step=max(newest.step, durable_step), rollback_of=None)


def _start(
    versions: Sequence[CommittedVersion],
    positions: Sequence[Position],
    *,
    step: int,
    rollback_of: int | None,
) -> PublishedStart:
    newest = versions[-1]
    roots = {item.version: item.model_root for item in versions}
    same = [at for at in positions if roots.get(at.version) == newest.model_root]
    held = same[-1:] or positions[-1:]
    # Weights that were given up had moments of their own; where nothing was, older moments beat none.
    fitting = same[-1:] if rollback_of is not None else held
    return PublishedStart(
        step=step,
        version=newest.version,
        rollback_of=rollback_of,
        checkpoint=fitting[-1].step if fitting else None,
        learning_rate=positions[-1].learning_rate if positions else None,
        baselines=held[0].baselines if held else {},
    )
