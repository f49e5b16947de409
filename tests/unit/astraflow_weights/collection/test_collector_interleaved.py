"""Writers, compactors, pullers and collectors in every order of their operations: nothing that is needed is ever
deleted, and what is not needed is gone in the end.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow_weights.codec import digest, peers, shards, tensor_hash, tensors
from astraflow_weights.collection.collector import Collector
from astraflow_weights.collection.collector import Stage as Reached
from astraflow_weights.collection.retention import Roots, paths_of
from astraflow_weights.errors import Fenced, NoPath, Unavailable, VerificationFailed
from astraflow_weights.mirror.pull_guard import LEASE_S, PullGuard
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions import inspection, intents, planner
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.pull import pull
from support.manual_clock import ManualClock
from support.published_models import new_collector, new_compactor, open_writer, read_log
from support.stepped_store import Actor, MemoryStore, Stage
from support.weight_models import KEYS, copied

SETTINGS = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100, upload_threads=1)
MODELS: list[dict[str, tensors.Array]] = [
    {"w": np.arange(64, dtype=np.uint16) + np.uint16(3 * index), "b": np.full(3, index, dtype=np.uint8)}
    for index in range(5)
]
ROOTS = [digest.model_root(tensor_hash.tensor_digests(model)) for model in MODELS]


def model_of(version: int) -> dict[str, tensors.Array]:
    """What every writer publishes as this version: so the next one stores what the one before left again."""
    return MODELS[version % len(MODELS)]


@dataclass
class World:
    """A store with actors on it, what they may count on, and a check of that after every deletion."""

    draw: random.Random
    lossy: bool = False
    stage: Stage = field(default_factory=Stage)
    clock: ManualClock = field(default_factory=ManualClock)
    pins: set[int] = field(default_factory=set)
    epoch: int = 0
    deleted_parts: int = 0

    def __post_init__(self) -> None:
        self.stage.store.check = self.check

    def write(self, store: Actor, *, epoch: int, versions: int) -> None:
        """Publish and compact until fenced."""
        if self.lossy:
            store.lose = lambda key: key.startswith((KEYS.entries, KEYS.merged)) and self.draw.random() < 0.2
        try:
            writer = open_writer(store, epoch=epoch, settings=SETTINGS, clock=self.clock)
        except (Fenced, Unavailable):
            return
        newest = writer.log.latest()
        base = None if newest is None else shards.whole(MODELS[ROOTS.index(newest.model_root)])
        publisher = ShardPublisher(
            writer, uploads=writer.uploads, peers=peers.OnePeer(), base=base, inline_snapshots=False
        )
        compactor = new_compactor(store, kept=publisher.kept, settings=SETTINGS, clock=self.clock)
        for _ in range(versions):
            version = len(writer.log.records)
            try:
                publisher.publish(shards.whole(model_of(version)), step=version)
            except Fenced:
                return
            except Unavailable:
                continue
            compactor.compact()

    def pull(self, store: Actor, *, held: int | None) -> None:
        """Go to the newest version as a mirror does; what is fetched is exact, or the path proves bad."""
        log, guard = read_log(store), PullGuard(clock=self.clock)
        if log.latest() is None:
            return
        target = len(log.records) - 1
        held = None if held is None or held > target else held
        avoid: frozenset = frozenset()
        with guard.over(store, log):
            for _ in range(20):
                try:
                    plan = guard.plan(
                        lambda avoided: planner.plan_pull(log, held=held, target=target, avoid=avoided),
                        avoid=avoid,
                    )
                    model = pull(
                        store,
                        plan,
                        manifest=log.manifest(target),
                        load_base=lambda: copied(model_of_held(log, held)),
                        threads=1,
                        max_bytes=10**6,
                    )
                except VerificationFailed as failure:
                    avoid |= failure.edges
                except NoPath:
                    return
                else:
                    assert (
                        digest.model_root(tensor_hash.tensor_digests(model)) == log.record(target).model_root
                    )
                    return

    def collect(self, store: Actor, *, steps: int) -> None:
        """Take rounds as far as they go."""
        collector = self.collector(store)
        for _ in range(steps):
            collector.step()

    def collector(self, store: ObjectStore) -> Collector:
        """A collector that knows the pins."""
        return new_collector(store, self.clock, lambda: Roots(pinned=frozenset(self.pins)), grace_s=0)

    def happen(self, event: str) -> None:
        """Time passes, a PUT that was given up arrives, or an operator pins something else."""
        if event == "time":
            # Less than an intent lasts: a PUT that arrives an hour after it was sent is beyond what is promised.
            self.clock.now_s = min(self.clock.now_s + self.draw.choice([1, 400, 1000]), intents.INTENT_S / 2)
        elif event == "late" and self.stage.late:
            self.stage.late.pop(0)()
        elif event == "pin":
            log = read_log(self.stage.store)
            if log.records:
                self.pins = {self.draw.randrange(self.horizon(log), len(log.records))}

    # ------------------------------------------------------------ what must hold

    def check(self, key: str, deleted: bool) -> None:
        """After every change of the store: what is visible within retention is whole."""
        if deleted and key.startswith(KEYS.parts):
            self.deleted_parts += 1
        if key.startswith((KEYS.parts, KEYS.entries)):
            self.check_whole()

    def check_whole(self) -> None:
        """Every version within retention, and every pinned one, has a path whose parts are all there."""
        store = self.stage.store
        log = read_log(store)
        reached: set[int] = set()
        horizon = self.horizon(log)
        for record in log.records:
            whole_paths = [edge for edge, parts in paths_of(record) if present(store, parts)]
            if any(edge.base_version is None or edge.base_version in reached for edge in whole_paths):
                reached.add(record.version)
            if record.version > horizon:
                for delta in record.deltas:
                    assert present(store, delta.parts), f"version {record.version} is torn"
                assert record.snapshot is None or present(store, record.snapshot)
        wanted = set(range(horizon, len(log.records))) | {pin for pin in self.pins if pin < len(log.records)}
        assert wanted <= reached, f"{sorted(wanted - reached)} cannot be built any more"

    def horizon(self, log: VersionLog) -> int:
        """The older of the newest two snapshots, counted here anew."""
        whole_snapshots = [
            record.version
            for record in log.records
            if record.offered_snapshot and present(self.stage.store, record.offered_snapshot)
        ]
        return whole_snapshots[-2] if len(whole_snapshots) > 1 else 0

    def finish(self) -> None:
        """Long after everybody has ended, a collector leaves only what is needed, and that is exact."""
        for arrive in self.stage.late:
            arrive()
        self.clock.now_s += max(intents.INTENT_S, LEASE_S) + 100
        collector = self.collector(self.stage.store)
        assert any(collector.step().stage is Reached.NOTHING for _ in range(12))
        store, log = self.stage.store, read_log(self.stage.store)
        assert not list(store.list(KEYS.intents))
        assert not list(store.list(KEYS.leases))
        named = {part.key for record in log.records for _, parts in paths_of(record) for part in parts}
        stored = {info.key for info in store.list(KEYS.parts)}
        assert stored == named, "garbage stayed, or a path that is offered names what is gone"
        self.check_whole()
        for version in {*range(self.horizon(log), len(log.records)), *self.pins}:
            if version < len(log.records):
                built = inspection.build_version(store, log, target=version, threads=1)
                assert digest.model_root(tensor_hash.tensor_digests(built)) == log.record(version).model_root


def model_of_held(log: VersionLog, held: int | None) -> dict[str, tensors.Array]:
    """The model that a puller holds."""
    assert held is not None
    return MODELS[ROOTS.index(log.record(held).model_root)]


def present(store: MemoryStore, parts: tuple) -> bool:
    """Whether every part is in the store."""
    return all(part.key in store.objects for part in parts)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), lossy=st.booleans())
def test_nothing_needed_is_deleted_and_nothing_else_stays(seed: int, lossy: bool) -> None:
    play(seed, lossy=lossy, turns=200)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), lossy=st.booleans())
def test_nothing_needed_is_deleted_in_many_orders(seed: int, lossy: bool) -> None:
    play(seed, lossy=lossy, turns=500)


def play(seed: int, *, lossy: bool, turns: int) -> None:
    """Give turns in bursts, and in between kill, fence, delay, pin and let time pass; in the end all must hold."""
    world = World(draw=random.Random(seed), lossy=lossy)
    draw, stage = world.draw, world.stage
    actors: dict[str, Actor] = {}
    zombies: list[Actor] = []
    for _ in range(turns):
        name = draw.choice(["writer", "writer", "collector", "other", "puller"])
        actor = actors.get(name)
        if actor is None or actor.done:
            actors[name] = start(world, name)
            continue
        event = draw.choices(["go", "kill", "forget", "time", "late", "pin"], [80, 5, 3, 4, 4, 4])[0]
        if event == "kill":
            stage.kill(actor)
        elif event == "forget" and name == "writer":
            # It loses its place without knowing, and goes on.
            zombies.append(actors.pop(name))
        elif event == "go":
            burst(stage, actor, draw)
        else:
            world.happen(event)
        if zombies:
            burst(stage, draw.choice(zombies), draw)
    for actor in [*actors.values(), *zombies]:
        stage.kill(actor)
    world.finish()


def burst(stage: Stage, actor: Actor, draw: random.Random) -> None:
    """Some operations of one actor without anybody between."""
    for _ in range(draw.choice([1, 1, 2, 5, 20, 60])):
        if not stage.step(actor):
            return


def start(world: World, name: str) -> Actor:
    """The next one of a kind."""
    if name == "writer":
        world.epoch += 1
        epoch = world.epoch
        return world.stage.start(name, lambda store: world.write(store, epoch=epoch, versions=20))
    if name == "puller":
        held = world.draw.choice([None, 0, 3, 8])
        return world.stage.start(name, lambda store: world.pull(store, held=held))
    return world.stage.start(name, lambda store: world.collect(store, steps=40))
