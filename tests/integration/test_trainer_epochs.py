"""Two trainers of one policy: the one that was replaced can neither ack, nor publish, nor win a number.

Real trainer processes, the first frozen by a failpoint while the second claims the policy and goes on.
"""

from pathlib import Path

import pytest

from astraflow_kit.failpoints import read_hits
from astraflow_kit.lifecycle import ExitCode
from support import trainer_process as trainers
from support.dataflow_world import World
from support.ledger_audit import audit
from support.trainer_process import TrainerProcess, census_of, forking, valkey

__all__ = ["forking", "valkey"]

STEPS = 3
pytestmark = [pytest.mark.slow]


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
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS, checkpoint_every_steps=STEPS)
    zombie, successor = (
        TrainerProcess(world.address, tmp_path, name=name) for name in ("zombie", "successor")
    )
    async with trainers.recorded(world, zombie, successor, steps=STEPS):
        zombie.start(failpoints=window.replace("@", "=stop@"))
        await zombie.frozen()
        await successor.lives()
        before = census_of(run)
        zombie.go_on()
        await zombie.exits_with(ExitCode.SUPERSEDED)
    assert [hit.acted for hit in read_hits(zombie.failpoints_log) if hit.acted] == [True]
    assert "epoch 1 of solver is not the current one (2, of trainer " in zombie.log
    after = census_of(run)
    assert after.records == before.records
    assert (after.steps[-1], after.epochs[-1]) == (STEPS, last_writer)
    assert audit(zombie.ledger, successor.ledger).last_step == STEPS
    await trainers.require_trained(world, steps=STEPS)
