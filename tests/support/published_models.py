"""Versions in a store as a trainer of one process publishes them, and how to read them back.

Owns the short way from a model in memory to a committed version through the product's own `ShardPublisher`, and from
a version back to the bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from astraflow_kit.clock import Clock
from astraflow_weights.codec import peers, tensor_hash
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.codec.tensors import Array, Model
from astraflow_weights.collection.collector import Collector, Stage
from astraflow_weights.collection.retention import Roots
from astraflow_weights.mirror.mirror import AdvanceResult, Mirror
from astraflow_weights.publish import compactor, shard_publisher
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.settings import CollectionSettings, PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions import collection_records, manifest
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.probe import Probe
from support.manual_clock import ManualClock
from support.weight_models import KEYS, POLICY, RUN, FaultyStore, make_model, same_model, trained

GRACE_S = 100.0
new_compactor = partial(compactor.Compactor, run_id=RUN, policy_id=POLICY)


class ModelPublisher(shard_publisher.ShardPublisher):
    """The product's publisher as a group of one rank, which takes whole models, too."""

    def __init__(self, writer: VersionWriter, *, base: Model | None = None, **options: Any) -> None:
        shards = None if base is None else whole(base)
        super().__init__(writer, uploads=writer.uploads, peers=peers.OnePeer(), base=shards, **options)

    def publish(
        self,
        model: Model | ShardedModel,
        *,
        step: int,
        learning_rate: float | None = None,
        probe: Probe | None = None,
    ) -> CommittedVersion:
        """Commit the model as the version of `step`."""
        shards = model if isinstance(model, ShardedModel) else whole(model)
        return super().publish(shards, step=step, learning_rate=learning_rate, probe=probe)


def committed(version: int, **changes: object) -> CommittedVersion:
    """What a writer says of a version that changed one of four elements, of the step of its number."""
    known: dict[str, Any] = dict.fromkeys(("version", "sequence", "step"), version)
    known |= {"manifest_sha256": bytes(32), "model_root": b"", "writer_epoch": 3, "rollback_of": None}
    known |= {"snapshot_bytes": 0, "delta_bytes": 8, "num_changed": 1, "num_elements": 4, "existed": False}
    return CommittedVersion(**(known | changes))


class PublishedModels:
    """A store, the publisher of its newest epoch, and the models of its versions 0, 1, 2 …"""

    def __init__(
        self,
        store: FaultyStore,
        *,
        settings: PublishSettings | None = None,
        clock: Clock | None = None,
        density: float = 0.02,
        **options: Any,
    ) -> None:
        self.store = store
        self.settings = settings
        self.density = density
        self.models: list[dict[str, Array]] = []
        self.writer = open_writer(store, settings=settings, clock=clock)
        self.publisher = ModelPublisher(self.writer, **options)

    def publish(self, model: dict[str, Array] | None = None) -> None:
        """Publish a model, or else what training makes of the newest one, as the next step."""
        if model is None:
            step = len(self.models)
            model = trained(self.models[-1], step, density=self.density) if step else make_model()
        self.models.append(model)
        self.publisher.publish(model, step=len(self.models) - 1)

    def publish_up_to(self, version: int) -> None:
        """Publish until there is this version."""
        while len(self.models) <= version:
            self.publish()

    def log(self) -> VersionLog:
        """The log as it is now."""
        return read_log(self.store)

    def advance(self, mirror: Mirror, target: int) -> AdvanceResult:
        """What the mirror did to get this version; it holds the version's bits."""
        result = mirror.advance(self.store, self.log(), target=target)
        assert same_model(mirror.load(), self.models[target])
        return result


def open_writer(store: ObjectStore, epoch: int = 1, **options: Any) -> VersionWriter:
    """The writer of an epoch; `options` are those of `VersionWriter.open`."""
    return VersionWriter.open(store, run_id=RUN, policy_id=POLICY, epoch=epoch, **options)


def steps(count: int, *, density: float = 0.01, seed: int = 0) -> list[dict[str, Array]]:
    """A model and what training makes of it, `count` models in all."""
    models = [make_model(seed)]
    for step in range(1, count):
        models.append(trained(models[-1], step, density=density))
    return models


def publish_all(publisher: ModelPublisher, models: Sequence[Model]) -> list[CommittedVersion]:
    """Publish the models as the versions of steps 0, 1, …"""
    return [publisher.publish(model, step=step) for step, model in enumerate(models)]


def published(store: ObjectStore, count: int, **options: Any) -> list[dict[str, Array]]:
    """Versions 0 to `count` - 1 of the first writer; their models."""
    models = steps(count)
    publish_all(ModelPublisher(open_writer(store, **options)), models)
    return models


def read_log(store: ObjectStore, policy_id: str = POLICY, *, run_id: str = RUN) -> VersionLog:
    """The log as it is now."""
    log = VersionLog(store, run_id=run_id, policy_id=policy_id)
    log.refresh()
    return log


def pulled(store: ObjectStore, version: int, **named: str) -> dict[str, Array]:
    """A version as a node's new mirror gets it; `named` are run and policy, if not those of every test."""
    with TemporaryDirectory() as folder:
        mirror = Mirror(Path(folder))
        mirror.advance(store, read_log(store, **named), target=version)
        return mirror.load()


def rank_publisher(
    store: ObjectStore,
    ranks: peers.Peers,
    *,
    epoch: int = 1,
    settings: PublishSettings | None = None,
    base: ShardedModel | None = None,
    **options: Any,
) -> shard_publisher.ShardPublisher:
    """One process's publisher, with the `options` of ShardPublisher; the first process writes the fence."""
    writer = open_writer(store, epoch, settings=settings) if ranks.index == 0 else None
    uploads = writer.uploads if writer else Uploads(store, keys=KEYS, threads=1)
    return shard_publisher.ShardPublisher(writer, uploads=uploads, peers=ranks, base=base, **options)


def commit_parts(
    writer: VersionWriter,
    model: Model,
    *,
    snapshot: Sequence[bytes] = (),
    delta: Sequence[bytes] = (),
    base_version: int | None = None,
    **options: Any,
) -> CommittedVersion:
    """Upload and commit encoded parts, as no publisher would: a delta starts from the version before, if from no other.

    `options` are those of the writer's `commit`; the step is the number of the version.
    """
    version = len(writer.log.records)
    base_version = version - 1 if base_version is None else base_version
    upload = writer.uploads.upload_parts
    named: dict[str, Any] = {"step": version, "tensors": tensor_hash.tensor_digests(model)}
    if snapshot:
        named["snapshot"] = upload(snapshot)
    if delta:
        named["deltas"] = (manifest.DeltaRef(base_version=base_version, parts=upload(delta)),)
    return writer.commit(**(named | options))


def bury(store: ObjectStore, number: int, *names: bytes) -> None:
    """A round of collection that wants the parts of these names."""
    tombstone = collection_records.Tombstone(number=number, parts=frozenset(names), created_time_s=0)
    store.put_if_absent(KEYS.tombstone(number), collection_records.encode_tombstone(KEYS, tombstone))


def new_collector(
    store: ObjectStore,
    clock: Clock | None,
    roots: Callable[[], Roots],
    *,
    keep_snapshots: int = 2,
    grace_s: float = GRACE_S,
) -> Collector:
    """A collector of the policy."""
    settings = CollectionSettings(keep_snapshots=keep_snapshots, grace_s=grace_s)
    return Collector(store, run_id=RUN, policy_id=POLICY, roots=roots, settings=settings, clock=clock)


def collect_all(collector: Collector, clock: ManualClock) -> None:
    """Take rounds until nothing is left that may go."""
    for _ in range(10):
        if collector.step().stage is Stage.NOTHING:
            return
        clock.now_s += GRACE_S
    raise AssertionError("there is no end to it")
