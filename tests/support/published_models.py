"""Versions in a store as a trainer of one process publishes them, and how to read them back.

Owns the short way from a model in memory to a committed version through the product's own `ShardPublisher`, and from
a version back to the bits.
"""

from collections.abc import Sequence
from pathlib import Path

from astraflow_kit.clock import Clock
from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.codec.tensors import Array, Model
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.log import VersionLog
from support.weight_models import POLICY, RUN, make_model, trained


class ModelPublisher(ShardPublisher):
    """The product's publisher as a group of one rank, which takes whole models, too."""

    def __init__(
        self,
        writer: VersionWriter,
        *,
        base: Model | None = None,
        assets: Sequence[Path] = (),
        context: bool = False,
        inline_snapshots: bool = True,
    ) -> None:
        super().__init__(
            writer,
            uploads=writer.uploads,
            peers=OnePeer(),
            base=None if base is None else whole(base),
            assets=assets,
            context=context,
            inline_snapshots=inline_snapshots,
        )

    def publish(
        self, model: Model | ShardedModel, *, step: int, learning_rate: float | None = None
    ) -> CommittedVersion:
        """Commit the model as the version of `step`."""
        shards = model if isinstance(model, ShardedModel) else whole(model)
        return super().publish(shards, step=step, learning_rate=learning_rate)


def open_writer(
    store: ObjectStore,
    epoch: int = 1,
    *,
    nonce: bytes | None = None,
    settings: PublishSettings | None = None,
    clock: Clock | None = None,
) -> VersionWriter:
    """The writer of an epoch."""
    return VersionWriter.open(
        store, run_id=RUN, policy_id=POLICY, epoch=epoch, nonce=nonce, settings=settings, clock=clock
    )


def steps(count: int, *, density: float = 0.01, seed: int = 0) -> list[dict[str, Array]]:
    """A model and what training makes of it, `count` models in all."""
    models = [make_model(seed)]
    for step in range(1, count):
        models.append(trained(models[-1], step, density=density))
    return models


def publish_all(publisher: ModelPublisher, models: Sequence[Model]) -> list[CommittedVersion]:
    """Publish the models as the versions of steps 0, 1, …"""
    return [publisher.publish(model, step=step) for step, model in enumerate(models)]


def published(
    store: ObjectStore, count: int, *, settings: PublishSettings | None = None, density: float = 0.01
) -> list[dict[str, Array]]:
    """Versions 0 to `count` - 1 of the first writer; their models."""
    models = steps(count, density=density)
    publish_all(ModelPublisher(open_writer(store, settings=settings)), models)
    return models


def read_log(store: ObjectStore) -> VersionLog:
    """The log as it is now."""
    log = VersionLog(store, run_id=RUN, policy_id=POLICY)
    log.refresh()
    return log


def pulled(store: ObjectStore, folder: Path, version: int) -> dict[str, Array]:
    """A version as a node's mirror in `folder` gets it."""
    mirror = Mirror(folder)
    mirror.advance(store, read_log(store), target=version)
    return mirror.load()
