"""Two trainers of one policy: the one that was replaced can neither ack, nor publish, nor win a number.

Real trainer processes, the first frozen by a failpoint while the second claims the policy and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_kit.failpoints import read_hits
from astraflow_kit.lifecycle import ExitCode
from astraflow_weights.store import open_store
from support import store_census
from support.dataflow_world import World, until
from support.ledger_audit import audit
from support.trainer_process import (
    GROUPS_PER_STEP,
    POLICY,
    TrainerProcess,
    create_run,
    forking,
    push_groups,
    valkey,
)

__all__ = ["valkey"]

STEPS = 3
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _forking() -> Iterator[None]:
    with forking():
        yield


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("window", "last_writer"),
    [
        ("weights.publish.parts_uploaded@2", 2),
        pytest.param("weights.publish.before_manifest@2", 2, marks=pytest.mark.ci),
        pytest.param("trainer.step_taken@2", 2, marks=pytest.mark.ci),
        pytest.param("trainer.committed@2", 2, marks=pytest.mark.ci),
        # A checkpoint is written after the versions it covers: the successor finds them all.
        pytest.param("trainer.checkpoint_half_written@1", 1, marks=pytest.mark.ci),
    ],
)
async def test_a_frozen_trainer_that_was_replaced_changes_nothing_and_says_who_has_its_policy(
    world: World, tmp_path: Path, window: str, last_writer: int
) -> None:
    name, _, number = window.partition("@")
    run = await create_run(world, folder=tmp_path, steps=STEPS, checkpoint_every_steps=STEPS)
    zombie = TrainerProcess(world.address, tmp_path, name="zombie")
    successor = TrainerProcess(world.address, tmp_path, name="successor")
    recording = asyncio.create_task(push_groups(world, count=STEPS * GROUPS_PER_STEP))
    try:
        zombie.start(failpoints=f"{name}=stop@{number}")

        async def is_frozen() -> bool:
            return await asyncio.to_thread(zombie.is_stopped)

        await until(is_frozen, within_s=120)
        successor.start()
        assert await asyncio.to_thread(successor.wait, timeout_s=120) == 0, successor.log
        before = store_census.take(open_store(run.store_uri), run_id=run.run_id, policy_id=POLICY)
        zombie.go_on()
        assert await asyncio.to_thread(zombie.wait, timeout_s=120) == ExitCode.SUPERSEDED, zombie.log
        await recording
    finally:
        recording.cancel()
        zombie.kill()
        successor.kill()
    assert [hit.acted for hit in read_hits(zombie.failpoints_log) if hit.acted] == [True]
    assert "epoch 1 of solver is not the current one (2, of trainer " in zombie.log
    after = store_census.take(open_store(run.store_uri), run_id=run.run_id, policy_id=POLICY)
    assert after.records == before.records
    assert (after.steps[-1], after.epochs[-1]) == (STEPS, last_writer)
    assert audit(zombie.ledger, successor.ledger).last_step == STEPS
    account = (await world.status()).trajectories
    assert (account.trained, account.conservation_error) == (STEPS * GROUPS_PER_STEP * 2, 0)
