"""Versions reach the engine from a real store and mirror; whatever fails leaves the old version serving."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import version_pb2
from astraflow_kit import log
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import EngineFaulty, EngineUnavailable
from astraflow_raas.policies.mirror_source import MirrorSource
from astraflow_raas.policies.served_policy import ServedPolicy, VersionUnavailable
from astraflow_raas.policies.weight_sync import WeightSync
from astraflow_weights.codec.tensors import Model
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.log import VersionLog
from support.fake_engine import FakeEngine
from support.published_models import ModelPublisher, open_writer
from support.raas_parts import write_tokenizer
from support.scripted_dataflow import eventually
from support.weight_models import POLICY, RUN, make_model, same_model, trained


@dataclass
class Trainer:
    """Publishes one version after the other."""

    publisher: ModelPublisher
    models: list[Model] = field(default_factory=list)

    def publish(self) -> version_pb2.Version:
        """Commit the next version and return its announcement."""
        step = len(self.models)
        model = trained(self.models[-1], step) if self.models else make_model()
        committed: CommittedVersion = self.publisher.publish(model, step=step)
        self.models.append(model)
        return version_pb2.Version(
            policy_id=POLICY, version=committed.version, manifest_sha256=committed.manifest_sha256
        )


@dataclass
class Setup:
    store: FileStore
    trainer: Trainer
    policy: ServedPolicy
    source: MirrorSource
    sync: WeightSync
    engine: FakeEngine

    async def serve(self, announced: version_pb2.Version) -> None:
        """Announce a version and wait until the engine serves it."""
        self.sync.announce(announced)
        await eventually(
            lambda: self.policy.version == announced.version, what=f"version {announced.version} serves"
        )

    async def serve_first(self) -> None:
        """Publish version 0 and start an engine with it."""
        self.sync.announce(self.trainer.publish())
        await self.start_engine()

    async def start_engine(self) -> None:
        """What a host does: start an engine with the version it is told."""
        async with self.sync.loading() as loadable:
            self.engine.version = loadable.version
            self.policy.engine_ready(self.engine, version=loadable.version)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    store = FileStore(tmp_path / "store")
    assets = [path for path in write_tokenizer(tmp_path / "tokenizer").iterdir() if path.is_file()]
    writer = open_writer(store)
    return Trainer(ModelPublisher(writer, assets=assets))


def never(model_bytes: int) -> Mirror:
    """There is a mirror."""
    raise AssertionError("a second mirror was asked for")


@pytest.fixture
def evaluation_hold_s() -> float:
    """Longer than any test; a test that waits for its end overrides it."""
    return 600.0


@pytest.fixture
async def setup(tmp_path: Path, trainer: Trainer, evaluation_hold_s: float) -> AsyncIterator[Setup]:
    store = FileStore(tmp_path / "store")
    policy, engine = ServedPolicy(POLICY), FakeEngine()
    log_reader = VersionLog(store, run_id=RUN, policy_id=POLICY)
    source = MirrorSource(store, log_reader=log_reader, mirror=Mirror(tmp_path / "mirror"), open_mirror=never)
    sync = WeightSync(policy, source=source, metrics=Metrics(), evaluation_hold_s=evaluation_hold_s)
    running = asyncio.create_task(sync.run())
    yield Setup(store, trainer, policy, source, sync, engine)
    await sync.stop(deadline_s=5.0)
    await running
    await policy.close()


async def test_the_first_version_starts_an_engine_and_brings_the_tokenizer(setup: Setup) -> None:
    assert setup.sync.waiting_for == "version"
    await setup.serve_first()
    assert setup.sync.waiting_for == ""
    assert setup.policy.tokenizer.stop_token_ids == (2,)
    async with setup.sync.loading() as loadable:
        assert same_model(map_model(loadable.directory), setup.trainer.models[0])


async def test_later_versions_are_fetched_as_deltas_and_swapped_in_while_the_engine_runs(
    setup: Setup,
) -> None:
    await setup.serve_first()
    for _ in range(3):
        await setup.serve(setup.trainer.publish())
    assert [version for _, version in setup.engine.swaps] == [1, 2, 3]
    assert (setup.source.counts.snapshots_fetched, setup.source.counts.deltas_fetched) == (1, 3)
    assert same_model(map_model(setup.engine.swaps[-1][0]), setup.trainer.models[3])


async def test_the_store_alone_activates_nothing(setup: Setup) -> None:
    await setup.serve_first()
    first, second = setup.trainer.publish(), setup.trainer.publish()
    await setup.serve(first)
    assert setup.source.version == 1
    await setup.serve(second)


async def test_announcements_out_of_order_never_go_back(setup: Setup) -> None:
    zero, one, two = (setup.trainer.publish() for _ in range(3))
    setup.sync.announce(two)
    await setup.start_engine()
    setup.sync.announce(zero)
    setup.sync.announce(one)
    await asyncio.sleep(0.05)
    assert setup.policy.version == 2
    assert setup.engine.swaps == []


async def test_an_entry_that_is_not_the_announced_one_is_refused(setup: Setup) -> None:
    await setup.serve_first()
    honest = setup.trainer.publish()
    honest.manifest_sha256 = bytes(32)
    setup.sync.announce(honest)
    await eventually(lambda: setup.sync.num_verification_failures, what="the refusal")
    assert setup.policy.version == 0
    # The next announcement is judged on its own.
    await setup.serve(setup.trainer.publish())


Damage = Callable[[Path], object]


def flip(path: Path) -> None:
    """One wrong bit at the end."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def cut(path: Path) -> None:
    """Half of it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def exchange(path: Path) -> None:
    """The whole, sound content of another object."""
    other = min(path.parent.iterdir(), key=lambda found: found.stat().st_mtime_ns)
    path.write_bytes(other.read_bytes())


PART, ENTRY = "*.afwd", "*.pb"
# Which object, what happens to it, the words of the refusal; each names the version or the object.
DAMAGES: dict[str, tuple[str, Damage, tuple[str, ...]]] = {
    "part with a wrong bit": (
        PART,
        flip,
        ("delta from version 0 of version 1 cannot be used", ".afwd", "sha256"),
    ),
    "part cut short": (PART, cut, ("delta from version 0 of version 1 cannot be used", "sha256")),
    "part exchanged": (PART, exchange, ("delta from version 0 of version 1 cannot be used", "sha256")),
    "part missing": (
        PART,
        Path.unlink,
        ("delta from version 0 of version 1", ".afwd", "is missing from file://"),
    ),
    "log entry with a wrong bit": (ENTRY, flip, ("log entry",)),
    "log entry cut short": (ENTRY, cut, ("log entry",)),
}


@pytest.mark.parametrize("row", DAMAGES)
async def test_damaged_bytes_leave_the_old_version_serving_are_named_and_counted(
    setup: Setup, row: str
) -> None:
    pattern, damage, words = DAMAGES[row]
    lines = io.StringIO()
    log.configure("test", log_format="json", stream=lines)
    await setup.serve_first()
    announced = setup.trainer.publish()
    path = newest(setup.store, pattern)
    whole = path.read_bytes()
    path.chmod(0o644)
    damage(path)
    setup.sync.announce(announced)
    await eventually(lambda: setup.sync.num_verification_failures, what="the refusal")
    assert setup.policy.version == 0
    assert setup.engine.swaps == []
    events = map(json.loads, lines.getvalue().splitlines())
    said = next(event for event in events if event["event"] == "weights.refused")
    assert (said["still_serving"], said["version"]) == (0, 1)
    assert [word for word in words if word not in said["message"]] == [], said
    fault = setup.sync.fault
    assert fault is not None
    assert (fault.policy_id, fault.version, fault.problem) == (POLICY, 1, said["message"][:512])
    path.write_bytes(whole)
    await eventually(lambda: setup.policy.version == 1, what="the repaired store is used")
    await eventually(lambda: setup.sync.fault is None, what="the fault is over")
    assert same_model(map_model(setup.engine.swaps[-1][0]), setup.trainer.models[1])


def rot(path: Path) -> None:
    """Change the end of it, in place."""
    with path.open("r+b") as file:
        file.seek(-20, 2)
        file.write(b"rot and more of it")


def newest(store: FileStore, pattern: str) -> Path:
    """The object of that kind that was written last."""
    folder = Path(store.uri.removeprefix("file://"))
    return max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime_ns)


async def test_damage_of_the_mirror_that_the_store_cannot_mend_is_told_until_it_is(setup: Setup) -> None:
    await setup.serve_first()
    async with setup.sync.loading() as loadable:
        weights = loadable.directory / "model.safetensors"
    rot(weights)
    snapshot = newest(setup.store, PART)
    away = snapshot.with_name("away")
    snapshot.rename(away)
    setup.sync.announce(setup.trainer.publish())
    await eventually(lambda: setup.sync.fault is not None, what="the server is told")
    assert setup.sync.fault is not None
    assert (setup.policy.version, setup.sync.fault.version) == (0, 0)
    assert setup.sync.fault.tensor
    assert setup.sync.fault.HasField("tile")
    away.rename(snapshot)
    await eventually(lambda: setup.policy.version == 1, what="the repaired mirror goes on")
    await eventually(lambda: setup.sync.fault is None, what="the fault is over")


async def test_a_version_the_store_does_not_list_yet_is_waited_for(setup: Setup) -> None:
    await setup.serve_first()
    setup.sync.announce(version_pb2.Version(policy_id=POLICY, version=1))
    await asyncio.sleep(0.05)
    assert setup.sync.num_verification_failures == 0
    setup.trainer.publish()
    await eventually(lambda: setup.policy.version == 1, what="the listed version serves")


async def test_a_failed_swap_is_tried_again_and_the_old_version_serves_meanwhile(setup: Setup) -> None:
    await setup.serve_first()
    setup.engine.swap_fault = EngineFaulty("shape mismatch")
    setup.sync.announce(setup.trainer.publish())
    await eventually(lambda: setup.source.version == 1, what="the new version is in the mirror")
    assert setup.policy.version == 0
    async with setup.sync.loading() as loadable:
        assert loadable.version == 1, "an engine that starts anew takes what the mirror holds"
    setup.engine.swap_fault = None
    await eventually(lambda: setup.policy.version == 1, what="the swap is repeated")


async def test_a_swap_whose_answer_was_lost_counts_when_the_engine_says_so(setup: Setup) -> None:
    await setup.serve_first()
    setup.engine.swap_fault = EngineUnavailable("connection reset")
    setup.engine.version = 1
    await setup.serve(setup.trainer.publish())


async def test_without_an_engine_the_next_one_is_started_with_the_newest_version(setup: Setup) -> None:
    await setup.serve_first()
    setup.policy.engine_lost()
    setup.sync.announce(setup.trainer.publish())
    await eventually(lambda: setup.source.version == 1, what="the version is fetched")
    await eventually_loadable(setup, 1)
    assert setup.engine.swaps == []


async def eventually_loadable(setup: Setup, version: int) -> None:
    while True:
        async with setup.sync.loading() as loadable:
            if loadable.version == version:
                return
        await asyncio.sleep(0.005)


async def test_an_evaluation_holds_the_next_version_back_until_it_is_done(setup: Setup) -> None:
    await setup.serve_first()
    with setup.policy.pinned(0):
        setup.sync.announce(setup.trainer.publish())
        await eventually(lambda: setup.sync.holding, what="the new version waits")
        assert setup.policy.version == 0
    await eventually(lambda: setup.policy.version == 1, what="the new version serves")
    with pytest.raises(VersionUnavailable, match="serves version 1"), setup.policy.pinned(0):
        pass


async def test_a_version_is_fetched_and_not_applied_while_an_evaluation_needs_the_one_before(
    setup: Setup,
) -> None:
    await setup.serve_first()
    with setup.policy.pinned(0):
        setup.sync.announce(setup.trainer.publish())
        await eventually(lambda: setup.sync.holding, what="the new version waits")
        assert setup.source.counts.deltas_fetched == 1
        setup.policy.engine_lost()
        async with setup.sync.loading() as loadable:
            assert loadable.version == 0, "an engine that restarts now must serve the evaluation"
            assert same_model(map_model(loadable.directory), setup.trainer.models[0])
    await eventually(lambda: setup.source.version == 1, what="the new version is applied")


async def test_nothing_is_applied_while_an_engine_loads(setup: Setup) -> None:
    await setup.serve_first()
    async with setup.sync.loading() as loadable:
        setup.sync.announce(setup.trainer.publish())
        await eventually(lambda: setup.source.counts.deltas_fetched == 1, what="the new version is fetched")
        await asyncio.sleep(0.05)
        assert (setup.source.version, loadable.version) == (0, 0)
    await eventually(lambda: setup.policy.version == 1, what="the new version serves")


@pytest.mark.parametrize("evaluation_hold_s", [0.05])
async def test_an_evaluation_that_takes_too_long_loses_its_version(setup: Setup) -> None:
    await setup.serve_first()
    with setup.policy.pinned(0):
        await setup.serve(setup.trainer.publish())


async def test_waves_of_evaluations_keep_their_version_between_them(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_raas.policies.served_policy._LINGER_S", 600.0)
    await setup.serve_first()
    with setup.policy.pinned(0):
        setup.sync.announce(setup.trainer.publish())
        await eventually(lambda: setup.sync.holding, what="the new version waits")
    await asyncio.sleep(0.05)
    with setup.policy.pinned(0):
        assert setup.policy.version == 0


async def test_a_restarted_node_finds_its_mirror_and_fetches_nothing(setup: Setup, tmp_path: Path) -> None:
    announced = setup.trainer.publish()
    setup.sync.announce(announced)
    await setup.sync.wait_for_weights()
    await setup.sync.stop(deadline_s=5.0)
    log_reader = VersionLog(setup.store, run_id=RUN, policy_id=POLICY)
    again = MirrorSource(
        setup.store, log_reader=log_reader, mirror=Mirror(tmp_path / "mirror"), open_mirror=never
    )
    assert again.version == 0
    assert again.fetch(announced) == tmp_path / "mirror" / "checkpoint"
    assert again.counts.fetched_bytes == 0
