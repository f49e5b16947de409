"""Two policies of one run train side by side, each in its own cadence, and the run ends when both have.

Real trainers over a real dataflow server; every task gives both policies a group.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from astraflow_weights.store import open_store
from support.dataflow_world import World, until
from support.ledger_audit import audit
from support.published_models import read_log
from support.trainer_process import KILLED, TrainerProcess, create_run, forking, tiny_model, valkey

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.slow]
STEPS = {"solver": 4, "critic": 2}
GROUPS = {"solver": 1, "critic": 3}
OVERRIDES = [
    "policies.solver.dataflow={groups_per_step: 1, max_staleness: 2}",
    "policies.solver.trainer.algorithm.loss=ppo_clip",
    "policies.critic={steps: 2, dataflow: {groups_per_step: 3, max_staleness: 0}, model: {path: MODEL}}",
    "policies.critic.trainer={optimizer: {learning_rate: 0}, checkpoint_every_steps: 1}",
]


async def _play_node(world: World) -> None:
    """Complete whatever may be leased, for both policies at their newest versions, until cancelled."""
    node, number = await world.node("player"), 0
    while True:
        versions = {item.policy_id: item.version.version for item in (await world.status()).policies}
        await world.submit(f"task-{number}")
        number += 1
        for lease in await node.lease(1, wait_s=1.0):
            await node.complete(lease, policies=tuple(STEPS), version=versions)


async def test_policies_train_side_by_side_to_their_own_number_of_steps(world: World, tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path))
    overrides = [override.replace("MODEL", model) for override in OVERRIDES]
    run = await create_run(world, folder=tmp_path, steps=STEPS["solver"], overrides=overrides)
    trainers = {name: TrainerProcess(world.address, tmp_path, name=name, policy=name) for name in STEPS}
    playing = None
    try:
        for trainer in trainers.values():
            trainer.start()
        await world.until(lambda now: all(item.HasField("version") for item in now.policies), within_s=90)
        playing = asyncio.create_task(_play_node(world))
        for trainer in trainers.values():
            await trainer.exits_with(0)
    finally:
        if playing is not None:
            playing.cancel()
        for trainer in trainers.values():
            trainer.kill()
    status = await world.status()
    assert {item.policy_id: item.last_finished_step for item in status.policies} == STEPS
    assert {item.policy_id: item.version.version for item in status.policies} == STEPS
    for policy, trainer in trainers.items():
        assert len(audit(trainer.ledger).step_of) == STEPS[policy] * GROUPS[policy] * 2
    await world.has_account()
    staleness = {item.policy_id: item.staleness.max for item in status.policies}
    assert staleness["critic"] == 0
    assert staleness["solver"] <= 2
    roots = {policy: _roots(run.store_uri, policy) for policy in STEPS}
    assert (len(roots["solver"]), len(roots["critic"])) == (STEPS["solver"] + 1, 1)  # one learns, one may not
    await world.finish()
    await until(world.is_finished, within_s=30)


async def test_a_trainer_killed_in_its_turn_keeps_it_and_the_frozen_one_waits(
    world: World, tmp_path: Path
) -> None:
    model = str(tiny_model(tmp_path))
    overrides = [
        *(override.replace("MODEL", model) for override in OVERRIDES),
        "dataflow.alternate_every_steps=1",
    ]
    await create_run(world, folder=tmp_path, steps=2, overrides=overrides)
    trainers = {name: TrainerProcess(world.address, tmp_path, name=name, policy=name) for name in STEPS}
    playing = None
    try:
        trainers["critic"].start(failpoints="trainer.step_taken=kill@2")
        trainers["solver"].start()
        await world.until(lambda now: all(item.HasField("version") for item in now.policies), within_s=90)
        playing = asyncio.create_task(_play_node(world))
        await trainers["critic"].exits_with(KILLED)
        await world.until(lambda now: any(wait.reason == "turn" for wait in now.waits))
        (frozen,) = [item for item in (await world.status()).policies if item.waits_for_turn_of]
        assert (frozen.policy_id, frozen.last_finished_step) == ("solver", 1)
        await trainers["critic"].lives()
        await trainers["solver"].exits_with(0)
    finally:
        if playing is not None:
            playing.cancel()
        for trainer in trainers.values():
            trainer.kill()
    assert _order_of_batches(*trainers.values()) == ["critic-1", "solver-1", "critic-2", "solver-2"]


def _order_of_batches(*trainers: TrainerProcess) -> list[str]:
    """Policy and step of each batch, in the order in which they were bound: ids end with a number of the run."""
    lines = [json.loads(line) for trainer in trainers for line in trainer.ledger.read_text().splitlines()]
    ids = {line["batch_id"] for line in lines}
    return [name.rpartition("-")[0] for name in sorted(ids, key=lambda name: int(name.rpartition("-")[2]))]


def _roots(store_uri: str, policy: str) -> Counter[bytes]:
    """The different weights among the versions of a policy."""
    log = read_log(open_store(store_uri), policy, run_id="run")
    return Counter(record.model_root for record in log.records)
