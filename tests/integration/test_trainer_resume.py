"""A trainer killed inside each window of a step ends with the bits, and running baselines, of one that was not.

Real trainer processes over a real dataflow server; the batches are the same for every run, so what they end with
can be compared. One thread on CPU: on a GPU only the ledger would be comparable.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from astraflow_kit.failpoints import read_hits
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.store import open_store
from astraflow_weights.versions.log import VersionLog
from support import store_census
from support import trainer_process as trainers
from support.damage import flip_a_byte
from support.dataflow_world import World
from support.ledger_audit import LedgerAudit, audit
from support.trainer_process import KILLED, TrainerProcess, census_of, forking, valkey

__all__ = ["forking", "valkey"]

STEPS = 6
pytestmark = [pytest.mark.slow]


@dataclass(frozen=True)
class Ending:
    """What a run ended with."""

    checkpoint: dict[str, torch.Tensor]
    baselines: Mapping[str, float]
    """The running baselines in it."""
    census: store_census.Census
    ledger: LedgerAudit


async def run_to_the_end(
    world: World,
    folder: Path,
    *,
    failpoints: str = "",
    name: str = "run",
    damage: str = "",
    prefetch: bool = True,
) -> Ending:
    """Train all steps, in two lives when a failpoint kills the first; `damage` names a checkpoint to break between."""
    run = await trainers.create_run(
        world,
        folder=folder,
        name=name,
        steps=STEPS,
        checkpoint_every_steps=2,
        # Each step's gradient depends on the running baseline that all steps before it made.
        overrides=["trainer.algorithm.advantage=rae", f"trainer.prefetch={str(prefetch).lower()}"],
    )
    trainer = TrainerProcess(world.address, folder, run_id=name)
    async with trainers.recorded(world, trainer, steps=STEPS):
        if failpoints:
            await trainer.lives(failpoints=failpoints, status=KILLED)
        if damage:
            flip_a_byte(trainer.work_dir / "checkpoints" / damage / "__0_0.distcp")
        await trainer.lives()
    assert ("checkpoint.damaged" in trainer.log) == bool(damage)
    step, checkpoint = trainers.newest_checkpoint(trainer.work_dir)
    assert step == STEPS
    await trainers.require_trained(world, steps=STEPS)
    baselines = trainers.newest_baselines(trainer.work_dir)
    return Ending(checkpoint, baselines, census_of(run), audit(trainer.ledger))


_undisturbed: list[Ending] = []


@pytest.fixture
async def undisturbed(world: World, tmp_path: Path) -> Ending:
    """What the same batches lead to when nobody is killed; made once."""
    if not _undisturbed:
        folder = tmp_path / "undisturbed"
        folder.mkdir()
        _undisturbed.append(await run_to_the_end(world, folder, name="undisturbed"))
    return _undisturbed[0]


SOME = (
    *("trainer.read_ahead@3", "trainer.step_taken@4", "weights.publish.before_manifest@4"),
    *("trainer.committed@4", "trainer.checkpoint_half_written@2"),
)
IN_CI = (
    *("trainer.intent_recorded@1", "trainer.step_acked@4", "trainer.before_publish@4"),
    *("weights.publish.parts_uploaded@4", "weights.publish.after_manifest@1", "trainer.announced@4"),
    *("trainer.checkpoint_half_written@1", "trainer.checkpoint_written@3"),
)
AT_OTHER_STEPS = (
    *("trainer.intent_recorded@4", "trainer.before_publish@1", "weights.publish.after_manifest@4"),
    "trainer.checkpoint_written@1",
)
WINDOWS = [
    *SOME,
    *(pytest.param(window, marks=pytest.mark.ci) for window in IN_CI),
    *(pytest.param(window, marks=pytest.mark.soak) for window in AT_OTHER_STEPS),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("window", WINDOWS)
async def test_a_trainer_killed_in_any_window_ends_with_the_same_bits(
    undisturbed: Ending, world: World, tmp_path: Path, window: str
) -> None:
    resumed = await run_to_the_end(world, tmp_path, failpoints=window.replace("@", "=kill@"))
    assert [hit for hit in read_hits(tmp_path / "trainer.failpoints.jsonl") if hit.acted], window
    ended, expected = resumed.checkpoint, undisturbed.checkpoint
    assert ended.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(expected[key], ended[key])] == []
    assert resumed.baselines == undisturbed.baselines
    # Four rows of mean 0.5 in each of six steps.
    assert list(resumed.baselines.values()) == [pytest.approx(0.5 * (1 - 0.95**24))]
    roots, wanted = (
        [record.model_root for record in ending.census.records] for ending in (resumed, undisturbed)
    )
    assert roots == wanted
    assert resumed.census.steps == list(range(STEPS + 1))
    assert resumed.ledger.step_of == undisturbed.ledger.step_of
    assert resumed.ledger.last_step == STEPS


@pytest.mark.timeout(240)
async def test_steps_have_the_same_batches_and_weights_when_nothing_is_read_ahead(
    undisturbed: Ending, world: World, tmp_path: Path
) -> None:
    plain = await run_to_the_end(world, tmp_path, prefetch=False)
    assert plain.ledger.step_of == undisturbed.ledger.step_of
    assert [record.model_root for record in plain.census.records] == [
        record.model_root for record in undisturbed.census.records
    ]


@pytest.mark.timeout(240)
async def test_a_replay_with_other_bytes_publishes_them_under_the_next_number(
    world: World, tmp_path: Path
) -> None:
    """As on a GPU that rounds otherwise the second time: here the model under the replay is another one."""
    run = await trainers.create_run(world, folder=tmp_path, steps=3, checkpoint_every_steps=3)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=3):
        await trainer.lives(failpoints="trainer.committed=kill@2", status=KILLED)
        shutil.rmtree(tmp_path / "model")
        trainers.tiny_model(tmp_path, seed=1)
        await trainer.lives()
    # The census rebuilds each version by its delta: version 2 stands on version 1, not on what the replay began with.
    census = census_of(run)
    assert census.steps == [0, 1, 1, 2, 3]
    assert census.epochs == [1, 1, 2, 2, 2]
    assert census.records[2].model_root != census.records[1].model_root
    assert [delta.base_version for delta in census.records[2].deltas] == [1]
    policy = (await world.status()).policies[0]
    assert (policy.version.version, policy.version.step) == (4, 3)
    assert audit(trainer.ledger).last_step == 3


@pytest.mark.timeout(240)
async def test_a_flipped_byte_in_the_newest_checkpoint_costs_a_replay_where_the_batches_are_retained(
    undisturbed: Ending, world: World, tmp_path: Path
) -> None:
    """Killed before it told the server of the checkpoint of step 4: that of step 2 and two steps again lead there."""
    resumed = await run_to_the_end(
        world, tmp_path, failpoints="trainer.checkpoint_written=kill@2", damage="step-000000000004"
    )
    ended, expected = resumed.checkpoint, undisturbed.checkpoint
    assert [key for key in expected if not torch.equal(expected[key], ended[key])] == []
    assert resumed.ledger.step_of == undisturbed.ledger.step_of
    assert [path.name for path in damaged_in(tmp_path)] == ["damaged-1-step-000000000004"]


@pytest.mark.timeout(240)
async def test_where_the_batches_were_released_published_weights_make_up_for_a_damaged_checkpoint(
    undisturbed: Ending, world: World, tmp_path: Path
) -> None:
    resumed = await run_to_the_end(
        world, tmp_path, failpoints="trainer.checkpoint_half_written=kill@3", damage="step-000000000004"
    )
    assert [path.name for path in damaged_in(tmp_path)] == ["damaged-1-step-000000000004"]
    # No step is taken twice or left out, and the versions up to the damage stay what they were.
    assert resumed.ledger.step_of == undisturbed.ledger.step_of
    assert resumed.census.steps == list(range(STEPS + 1))
    roots, wanted = (
        [record.model_root for record in ending.census.records][:5] for ending in (resumed, undisturbed)
    )
    assert roots == wanted


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "window",
    [
        pytest.param("trainer.checkpoint_written=kill@2", id="the checkpoint has the weights"),
        pytest.param("trainer.committed=kill@6", id="a replay makes the weights"),
    ],
)
async def test_a_version_whose_parts_are_gone_is_made_readable_again(
    world: World, tmp_path: Path, window: str
) -> None:
    """No mirror and no path are left: the trainer's own weights are."""
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS, checkpoint_every_steps=2)
    trainer, store = TrainerProcess(world.address, tmp_path), open_store(run.store_uri)
    async with trainers.recorded(world, trainer, steps=STEPS):
        await trainer.lives(failpoints=window, status=KILLED)
        shutil.rmtree(trainer.work_dir / "published", ignore_errors=True)
        log = VersionLog(store, run_id="run", policy_id=trainers.POLICY)
        log.refresh()
        newest = log.records[-1]
        for ref in (
            *(newest.offered_snapshot or ()),
            *(ref for to in newest.offered_deltas for ref in to.parts),
        ):
            store.delete(ref.key)
        await trainer.lives()
    assert "weights.newest_version_lost" in trainer.log
    log.refresh()
    mirror = Mirror(tmp_path / "mirror")
    for version in (newest.version, log.records[-1].version):
        assert mirror.advance(store, log, target=version).version == version
    assert log.records[-1].step == STEPS
    assert audit(trainer.ledger).last_step == STEPS


def damaged_in(folder: Path) -> list[Path]:
    """Checkpoints that were put aside."""
    return sorted((folder / "trainer" / "checkpoints").glob("damaged-*"))
