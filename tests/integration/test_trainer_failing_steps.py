"""A batch whose step raises twice alike is quarantined, whatever the cause; the run goes on, or is stopped by name.

A real trainer and a real server; each end of the trainer is one that its supervisor restarts.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from astraflow.commands.bottleneck import Bound, find_failure
from astraflow_kit.lifecycle import ExitCode
from support import trainer_process as trainers
from support.dataflow_world import World
from support.trainer_process import KILLED, TrainerProcess, forking, valkey

__all__ = ["forking", "valkey"]

STEPS = 3
PER_STEP = trainers.GROUPS_PER_STEP * trainers.GROUP_SIZE
PARTICULAR = "trainer.algorithm.loss=support.broken_plugins:ParticularLoss"
CAUSES = {
    "a loss plug-in": (["", ""], "ValueError: too unlikely (broken_plugins.py:"),
    # Hits are numbered across lives: the second step, then the same one again.
    "anything else": (
        ["trainer.step_taken=raise@2", "trainer.step_taken=raise@3"],
        "FailpointRaised: failpoint 'trainer.step_taken' raised as armed (failpoints.py:",
    ),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("lives", "said"), CAUSES.values(), ids=CAUSES)
async def test_it_leaves_the_run_with_the_line_of_its_exception_and_the_run_is_trained(
    world: World, tmp_path: Path, lives: Sequence[str], said: str
) -> None:
    await trainers.create_run(
        world, folder=tmp_path, steps=STEPS, checkpoint_every_steps=1, overrides=[PARTICULAR]
    )
    trainer = TrainerProcess(world.address, tmp_path)
    is_loss = not lives[0]
    unlikely = [trainers.GROUPS_PER_STEP] if is_loss else []
    async with trainers.recorded(world, trainer, steps=STEPS + 1, unlikely=unlikely):
        for failpoints in lives:
            await trainer.lives(failpoints=failpoints, status=ExitCode.FAILED)
        await world.has_account(trained=PER_STEP, dropped={})
        await trainer.lives()
    await world.has_account(
        ingested=(STEPS + 1) * PER_STEP, trained=STEPS * PER_STEP, dropped={"quarantined": PER_STEP}
    )
    (failure,) = (await world.why()).failures
    assert (failure.reason, failure.count, failure.in_a_row) == ("step_failed", 1, 0)
    assert failure.detail.startswith("policy solver, batch solver-2-")
    assert said in failure.detail
    assert not (trainer.work_dir / "failed-step.json").exists()


async def test_a_run_in_which_too_many_fail_is_stopped_and_its_trainer_ends_well(
    world: World, tmp_path: Path
) -> None:
    overrides = ["trainer.algorithm.loss=support.broken_plugins:Loss", "dataflow.max_failed_batches=0"]
    await trainers.create_run(world, folder=tmp_path, steps=STEPS, overrides=overrides)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=1):
        for _ in range(2):
            await trainer.lives(status=ExitCode.FAILED)
        await trainer.lives()
    why = await world.why()
    for words in (
        "1 batches of solver in a row failed in training (dataflow.max_failed_batches is 0)",
        "loss plug-in 'support.broken_plugins:Loss' raised IndexError: no such token (broken_plugins.py:",
    ):
        assert words in why.stopped_for
    verdict = find_failure(why.failures, stopped_for=why.stopped_for)
    assert verdict is not None
    assert verdict.bound is Bound.FAILING
    await world.has_account(trained=0, dropped={"quarantined": PER_STEP})


async def test_a_trainer_that_is_killed_in_a_step_again_and_again_loses_no_batch(
    world: World, tmp_path: Path
) -> None:
    await trainers.create_run(world, folder=tmp_path, steps=1)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=1):
        for number in range(1, 4):
            await trainer.lives(failpoints=f"trainer.step_taken=kill@{number}", status=KILLED)
        await trainer.lives()
    await world.has_account(trained=PER_STEP, dropped={})


@pytest.mark.ci
async def test_a_batch_whose_step_kills_its_process_every_time_is_given_up_though_steps_before_it_are_replayed(
    world: World, tmp_path: Path
) -> None:
    await trainers.create_run(world, folder=tmp_path, steps=STEPS, checkpoint_every_steps=STEPS)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=STEPS + 1):
        for life in range(1, 6):
            # In each life the first step is taken, or replayed, and the second one ends it.
            await trainer.lives(failpoints=f"trainer.step_taken=kill@{2 * life}", status=KILLED)
        await trainer.lives()
    await world.has_account(
        ingested=(STEPS + 1) * PER_STEP, trained=STEPS * PER_STEP, dropped={"quarantined": PER_STEP}
    )
    (failure,) = (await world.why()).failures
    assert failure.reason == "step_failed"
    assert "step 2 was begun 5 times and never ended" in failure.detail
