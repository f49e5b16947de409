"""Versions reach the engine from a real store and mirror; whatever fails leaves the old version serving."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import pytest
import structlog.testing

from astraflow.dataflow.v1 import version_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import EngineDoubtful, EngineFaulty, EngineUnavailable, PauseMode
from astraflow_raas.policies.canary import WeightsDiffer
from astraflow_raas.policies.mirror_source import MirrorSource
from astraflow_raas.policies.served_policy import ServedPolicy, VersionUnavailable
from astraflow_raas.policies.weight_sync import WeightSync
from astraflow_weights.codec.tensors import Model
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.probe import Probe, ProbeAnswer
from support.fake_engine import FakeEngine
from support.mount_points import unmounted
from support.published_models import ModelPublisher, open_writer
from support.raas_parts import generate_call, write_tokenizer
from support.scripted_dataflow import eventually
from support.weight_models import POLICY, RUN, make_model, same_model, trained

ANSWER = ProbeAnswer(prompt_ids=(5, 6), token_ids=(11, 12), logprobs=(-0.5, -0.25), margins=(3.0, 2.0))


@dataclass
class Trainer:
    """Publishes one version after the other."""

    publisher: ModelPublisher
    models: list[Model] = field(default_factory=list)
    probe: Probe | None = None

    def publish(self) -> version_pb2.Version:
        """Commit the next version and return its announcement."""
        step = len(self.models)
        self.models.append(trained(self.models[-1], step) if self.models else make_model())
        made = self.publisher.publish(self.models[-1], step=step, probe=self.probe)
        return version_pb2.Version(policy_id=POLICY, version=step, manifest_sha256=made.manifest_sha256)


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
        await self.serves(announced.version)

    def announce_next(self) -> None:
        """Publish the next version and announce it."""
        self.sync.announce(self.trainer.publish())

    async def hold_next(self) -> None:
        """Publish and announce a version that an evaluation holds back."""
        self.announce_next()
        await eventually(lambda: self.sync.holding, what="the new version waits")

    async def serves(self, version: int) -> None:
        """Wait until the engine serves a version."""
        await eventually(lambda: self.policy.version == version, what=f"version {version} serves")

    async def start_engine(self) -> None:
        """What a host does: start an engine with the version it is told."""
        async with self.sync.loading() as loadable:
            self.engine.version = loadable.version
            self.policy.engines[0].ready(self.engine, version=loadable.version)


def source_of(store: FileStore, folder: Path) -> MirrorSource:
    """A source over the mirror in a folder; it asks for no second one."""
    log_reader, never = VersionLog(store, run_id=RUN, policy_id=POLICY), Mock(side_effect=AssertionError)
    return MirrorSource(store, log_reader=log_reader, mirror=Mirror(folder / "mirror"), open_mirror=never)


@pytest.fixture
def evaluation_hold_s() -> float:
    """Longer than any test; a test that waits for its end overrides it."""
    return 600.0


@pytest.fixture
async def setup(tmp_path: Path, evaluation_hold_s: float) -> AsyncIterator[Setup]:
    store = FileStore(tmp_path / "store")
    assets = [path for path in write_tokenizer(tmp_path / "tokenizer").iterdir() if path.is_file()]
    trainer = Trainer(ModelPublisher(open_writer(store), assets=assets))
    policy, engine = ServedPolicy(POLICY, num_engines=2), FakeEngine()
    source = source_of(store, tmp_path)
    sync = WeightSync(policy, source=source, metrics=Metrics(), evaluation_hold_s=evaluation_hold_s)
    running = asyncio.create_task(sync.run())
    yield Setup(store, trainer, policy, source, sync, engine)
    await sync.stop(deadline_s=5.0)
    await running
    await policy.close()


@pytest.fixture
async def serving(setup: Setup) -> Setup:
    """Version 0 serves."""
    setup.announce_next()
    await setup.start_engine()
    return setup


async def test_the_first_version_starts_an_engine_and_brings_the_tokenizer(setup: Setup) -> None:
    assert setup.sync.waiting_for == "version"
    setup.announce_next()
    await setup.start_engine()
    assert setup.sync.waiting_for == ""
    assert setup.policy.tokenizer.stop_token_ids == (2,)
    async with setup.sync.loading() as loadable:
        assert same_model(map_model(loadable.directory), setup.trainer.models[0])


async def test_later_versions_are_fetched_as_deltas_and_swapped_in(serving: Setup) -> None:
    for _ in range(3):
        await serving.serve(serving.trainer.publish())
    assert [version for _, version in serving.engine.swaps] == [1, 2, 3]
    assert (serving.source.counts.snapshots_fetched, serving.source.counts.deltas_fetched) == (1, 3)
    assert same_model(map_model(serving.engine.swaps[-1][0]), serving.trainer.models[3])


async def test_the_store_alone_activates_nothing(serving: Setup) -> None:
    first, second = serving.trainer.publish(), serving.trainer.publish()
    await serving.serve(first)
    assert serving.source.version == 1
    await serving.serve(second)


async def test_announcements_out_of_order_never_go_back(setup: Setup) -> None:
    *older, newest = (setup.trainer.publish() for _ in range(3))
    setup.sync.announce(newest)
    await setup.start_engine()
    for announced in older:
        setup.sync.announce(announced)
    await asyncio.sleep(0.05)
    assert (setup.policy.version, setup.engine.swaps) == (2, [])


async def test_an_entry_that_is_not_the_announced_one_is_refused(serving: Setup) -> None:
    honest = serving.trainer.publish()
    honest.manifest_sha256 = bytes(32)
    serving.sync.announce(honest)
    await eventually(lambda: serving.sync.num_verification_failures, what="the refusal")
    assert serving.policy.version == 0
    # The next announcement is judged on its own.
    await serving.serve(serving.trainer.publish())


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
DELTA = "delta from version 0 of version 1"


# Which object, what happens to it, the words of the refusal; each names the version or the object.
@pytest.mark.parametrize(
    ("pattern", "damage", "words"),
    [
        pytest.param(PART, flip, [f"{DELTA} cannot be used", ".afwd", "sha256"], id="part with a wrong bit"),
        pytest.param(PART, cut, [f"{DELTA} cannot be used", "sha256"], id="part cut short"),
        pytest.param(PART, exchange, [f"{DELTA} cannot be used", "sha256"], id="part exchanged"),
        pytest.param(PART, Path.unlink, [DELTA, ".afwd", "is missing from file://"], id="part missing"),
        pytest.param(ENTRY, flip, ["log entry"], id="log entry with a wrong bit"),
        pytest.param(ENTRY, cut, ["log entry"], id="log entry cut short"),
    ],
)
async def test_damaged_bytes_leave_the_old_version_serving_are_named_and_counted(
    serving: Setup, pattern: str, damage: Callable[[Path], object], words: list[str]
) -> None:
    announced = serving.trainer.publish()
    path = newest(serving.store, pattern)
    whole = path.read_bytes()
    path.chmod(0o644)
    damage(path)
    # Else a log entry is read from the copy in it.
    next(path.parents[1].rglob("latest")).unlink()
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        serving.sync.announce(announced)
        await eventually(lambda: serving.sync.num_verification_failures, what="the refusal")
    assert (serving.policy.version, serving.engine.swaps) == (0, [])
    said = next(line for line in lines if line["event"] == "weights.refused")
    assert (said["still_serving"], said["version"]) == (0, 1)
    assert [word for word in words if word not in said["message"]] == [], said
    problem = said["message"][:512]
    assert serving.sync.fault == version_pb2.WeightFault(policy_id=POLICY, version=1, problem=problem)
    path.write_bytes(whole)
    await serving.serves(1)
    await eventually(lambda: serving.sync.fault is None, what="the fault is over")
    assert same_model(map_model(serving.engine.swaps[-1][0]), serving.trainer.models[1])


def rot(path: Path) -> None:
    """Change the end of it, in place."""
    with path.open("r+b") as file:
        file.seek(-20, 2)
        file.write(b"rot and more of it")


def newest(store: FileStore, pattern: str) -> Path:
    """The object of that kind that was written last."""
    folder = Path(store.uri.removeprefix("file://"))
    return max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime_ns)


async def test_damage_of_the_mirror_that_the_store_cannot_mend_is_told_until_it_is(serving: Setup) -> None:
    async with serving.sync.loading() as loadable:
        weights = loadable.directory / "model.safetensors"
    rot(weights)
    snapshot = newest(serving.store, PART)
    away = snapshot.with_name("away")
    snapshot.rename(away)
    serving.announce_next()
    await eventually(lambda: serving.sync.fault is not None, what="the server is told")
    fault = serving.sync.fault
    assert fault is not None
    assert (serving.policy.version, fault.version, fault.HasField("tile")) == (0, 0, True)
    assert fault.tensor
    away.rename(snapshot)
    await serving.serves(1)
    await eventually(lambda: serving.sync.fault is None, what="the fault is over")


async def test_a_store_that_is_not_mounted_is_named_until_it_is(serving: Setup) -> None:
    announced = serving.trainer.publish()
    bring_back = unmounted(Path(serving.store.uri.removeprefix("file://")))
    serving.sync.announce(announced)
    await eventually(lambda: serving.sync.fault is not None, what="the server is told")
    fault = serving.sync.fault
    assert fault is not None
    assert (fault.policy_id, fault.version, fault.waiting_for) == (POLICY, 1, "store_missing")
    assert "it is not mounted" in fault.problem
    assert (serving.policy.version, serving.sync.num_verification_failures) == (0, 0)
    bring_back()
    await serving.serves(1)
    await eventually(lambda: serving.sync.fault is None, what="the fault is over")


async def test_a_version_the_store_does_not_list_yet_is_waited_for(serving: Setup) -> None:
    serving.sync.announce(version_pb2.Version(policy_id=POLICY, version=1))
    await asyncio.sleep(0.05)
    assert serving.sync.num_verification_failures == 0
    serving.trainer.publish()
    await serving.serves(1)


async def test_a_failed_swap_is_tried_again_and_the_old_version_serves_meanwhile(serving: Setup) -> None:
    serving.engine.swap_fault = EngineFaulty("shape mismatch")
    serving.announce_next()
    await eventually(lambda: serving.source.version == 1, what="the new version is in the mirror")
    assert serving.policy.version == 0
    async with serving.sync.loading() as loadable:
        assert loadable.version == 1, "an engine that starts anew takes what the mirror holds"
    serving.engine.swap_fault = None
    await serving.serves(1)


def break_swap(engine: FakeEngine) -> None:
    engine.swap_fault = EngineDoubtful("it holds part of the new weights")


def break_samples(engine: FakeEngine) -> None:
    engine.canary_fault = EngineFaulty("log-prob nan is not a finite number")


def break_tokens(engine: FakeEngine) -> None:
    engine.canary_token = 10**6


def break_label(engine: FakeEngine) -> None:
    engine.sampled_as = 0


@pytest.mark.parametrize("breaks", [break_swap, break_samples, break_tokens, break_label])
async def test_an_engine_that_does_not_prove_its_new_weights_samples_nothing_more(
    serving: Setup, breaks: Callable[[FakeEngine], None]
) -> None:
    breaks(serving.engine)
    serving.announce_next()
    await eventually(lambda: not serving.policy.is_served, what="the engine is out of service")
    await eventually(lambda: serving.engine.closed, what="answers under way are not believed either")
    with pytest.raises(EngineDoubtful):
        serving.policy.engines[0].require_trust()
    # Its host starts the next one, with what the mirror holds.
    serving.engine = FakeEngine()
    await serving.start_engine()
    serving.policy.engines[0].require_trust()
    assert (serving.policy.version, serving.engine.version) == (1, 1)


@pytest.fixture
def proving(serving: Setup) -> Setup:
    """The next versions say what they answer, and the engine answers that, except when it loaded something else."""
    serving.trainer.probe = serving.engine.probe = (ANSWER,)
    return serving


async def test_an_engine_that_answers_otherwise_than_its_weights_is_given_them_again(proving: Setup) -> None:
    proving.engine.num_wrong_loads = 1
    with structlog.testing.capture_logs() as logs:
        await proving.serve(proving.trainer.publish())
    # Calls that sampled with those weights are made again, and it is over.
    assert proving.engine.paused == [PauseMode.IN_PLACE, PauseMode.ABORT]
    assert [version for _, version in proving.engine.swaps] == [1, 1]
    assert "token 0 is 3, expected 11" in next(
        entry["message"] for entry in logs if entry["event"] == "engine.weights_differ"
    )
    assert proving.sync.fault is None
    assert not proving.engine.closed


async def test_one_that_loads_the_wrong_weights_twice_is_replaced_and_reported_until_another_proves_itself(
    proving: Setup,
) -> None:
    proving.engine.num_wrong_loads = 2
    proving.announce_next()
    await eventually(lambda: proving.engine.closed, what="nobody samples with it")
    with pytest.raises(EngineDoubtful, match="loaded again: "):
        proving.policy.engines[0].require_trust()
    await eventually(lambda: proving.source.version == 1, what="the mirror is compared again")
    fault = proving.sync.fault
    assert fault is not None
    assert (fault.policy_id, fault.version) == (POLICY, 1)
    assert "does not answer as its weights do" in fault.problem
    proving.engine = FakeEngine(version=1, probe=(ANSWER,))
    await proving.sync.prove(proving.engine, version=1)
    assert proving.sync.fault is None


async def test_a_failed_second_load_also_takes_the_engine_out(proving: Setup) -> None:
    proving.engine.num_wrong_loads = 1
    proving.engine.swap_faults = [None, EngineUnavailable("it ended")]
    proving.announce_next()
    await eventually(lambda: proving.engine.closed, what="nobody samples with it")
    assert proving.policy.engines[0].engine is None


async def test_an_unanswered_proof_does_not_end_the_report(proving: Setup) -> None:
    await proving.serve(proving.trainer.publish())
    wrong = FakeEngine(version=1, probe=(ANSWER,), holds_wrong=True)
    with pytest.raises(WeightsDiffer):
        await proving.sync.prove(wrong, version=1)
    wrong.canary_fault = EngineUnavailable("no answer in time")
    await proving.sync.prove(wrong, version=1)
    assert proving.sync.fault is not None


async def test_an_engine_that_could_not_be_asked_for_its_proof_goes_on(serving: Setup) -> None:
    serving.engine.canary_fault = EngineUnavailable("no answer in time")
    await serving.serve(serving.trainer.publish())
    assert serving.policy.engines[0].engine is serving.engine


async def test_all_engines_of_a_policy_move_on_together_and_one_that_fails_stays_behind_alone(
    serving: Setup,
) -> None:
    second = FakeEngine(version=0)
    serving.policy.engines[1].ready(second, version=0)
    await serving.serve(serving.trainer.publish())
    assert (serving.engine.version, second.version) == (1, 1)
    second.swap_fault = EngineUnavailable("it refuses the update")
    serving.announce_next()
    await serving.serves(2)
    assert [each.version for each in serving.policy.engines] == [2, 1]
    await serving.policy.generate(generate_call(), key="task")
    assert second.requests == [], "what it samples is of another version"
    second.swap_fault = None
    await eventually(lambda: second.version == 2, what="it has caught up")


async def test_engines_start_side_by_side_and_a_newer_version_waits_for_them(serving: Setup) -> None:
    async with serving.sync.loading() as first, serving.sync.loading() as second:
        assert (first.version, second.version) == (0, 0)
        serving.announce_next()
        await eventually(lambda: serving.policy.is_moving_on, what="the version waits")
        with pytest.raises(VersionUnavailable), serving.policy.pinned(0):
            pass
        await serving.policy.generate(generate_call(), key="task")
        assert serving.engine.swaps == []
    await serving.serves(1)


async def test_without_an_engine_the_next_one_is_started_with_the_newest_version(serving: Setup) -> None:
    serving.policy.engines[0].lost()
    serving.announce_next()
    await eventually(lambda: serving.source.version == 1, what="the version is fetched")
    async with serving.sync.loading() as loadable:
        assert (loadable.version, serving.engine.swaps) == (1, [])


async def test_an_evaluation_holds_the_next_version_back_until_it_is_done(serving: Setup) -> None:
    with serving.policy.pinned(0):
        await serving.hold_next()
        assert serving.policy.version == 0
    await serving.serves(1)
    with pytest.raises(VersionUnavailable, match="serves version 1"), serving.policy.pinned(0):
        pass


async def test_a_version_is_fetched_and_not_applied_while_an_evaluation_runs(serving: Setup) -> None:
    with serving.policy.pinned(0):
        await serving.hold_next()
        assert serving.source.counts.deltas_fetched == 1
        serving.policy.engines[0].lost()
        async with serving.sync.loading() as loadable:
            assert loadable.version == 0, "an engine that restarts now must serve the evaluation"
            assert same_model(map_model(loadable.directory), serving.trainer.models[0])
    await eventually(lambda: serving.source.version == 1, what="the new version is applied")


async def test_nothing_is_applied_while_an_engine_loads(serving: Setup) -> None:
    async with serving.sync.loading() as loadable:
        serving.announce_next()
        await eventually(lambda: serving.source.counts.deltas_fetched == 1, what="the new version is fetched")
        await asyncio.sleep(0.05)
        assert (serving.source.version, loadable.version) == (0, 0)
    await serving.serves(1)


@pytest.mark.parametrize("evaluation_hold_s", [0.05])
async def test_an_evaluation_that_takes_too_long_loses_its_version(serving: Setup) -> None:
    with serving.policy.pinned(0):
        await serving.serve(serving.trainer.publish())


async def test_waves_of_evaluations_share_a_version(serving: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow_raas.policies.served_policy._LINGER_S", 600.0)
    with serving.policy.pinned(0):
        await serving.hold_next()
    await asyncio.sleep(0.05)
    with serving.policy.pinned(0):
        assert serving.policy.version == 0


async def test_a_restarted_node_finds_its_mirror_and_fetches_nothing(setup: Setup, tmp_path: Path) -> None:
    announced = setup.trainer.publish()
    setup.sync.announce(announced)
    await setup.sync.wait_for_weights()
    await setup.sync.stop(deadline_s=5.0)
    again = source_of(setup.store, tmp_path)
    assert again.version == 0
    assert again.fetch(announced) == tmp_path / "mirror" / "checkpoint"
    assert again.counts.fetched_bytes == 0


async def test_a_report_ends_with_the_proof_of_the_engine_that_it_is_about(proving: Setup) -> None:
    await proving.serve(proving.trainer.publish())
    wrong, right = (FakeEngine(version=1, probe=(ANSWER,), holds_wrong=wrong) for wrong in (True, False))
    with pytest.raises(WeightsDiffer):
        await proving.sync.prove(wrong, version=1, number=2)
    await proving.sync.prove(right, version=1, number=1)
    assert proving.sync.fault is not None
    await proving.sync.prove(right, version=1, number=2)
    assert proving.sync.fault is None
