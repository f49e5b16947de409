"""`dataflow.max_abs_reward` of a recipe decides what a server takes, and what a node pushes."""

from pathlib import Path

import pytest

from support.dataflow_world import World
from support.raas_node import local_node

pytestmark = [pytest.mark.integration, pytest.mark.slow]


class Constant:
    """A reward of the same value for everything."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, task: object, completion: str) -> float:
        """Return it."""
        return self.value


def constant(value: float) -> dict[str, object]:
    return {"reward": f"{{use: '{__name__}:Constant', with: {{value: {value}}}}}"}


async def test_a_push_beyond_the_recipe_s_bound_is_poison_and_one_at_it_is_not(world: World) -> None:
    _, node = await world.started("t1", max_abs_reward=2)
    (lease,) = await node.lease()
    for number, said in enumerate([{"reward": 2.5}, {"metrics": {"score": -2.5}}]):
        assert await node.outcome(node.episode(lease, 0, episode_id=f"bad-{number}", **said)) == "POISON"
    assert await node.outcome(node.episode(lease, 0, reward=-2.0, metrics={"score": 2.0})) == "ACCEPTED"


async def test_a_node_fails_a_task_whose_reward_is_beyond_the_recipe_s_bound(
    world: World, tmp_path: Path
) -> None:
    await world.create_run(raas=constant(2.5), max_attempts=1, max_abs_reward=2)
    await world.trainer()
    await world.submit("t1")
    async with local_node(world.address, tmp_path):
        await world.until(lambda status: status.dead_letters == 1)
    (letter,) = (await world.dead_letters()).dead_letters
    assert "reward 2.5, dataflow.max_abs_reward allows -2 to 2" in letter.detail
    await world.has_account(ingested=0)


async def test_a_node_pushes_a_reward_at_the_recipe_s_bound(world: World, tmp_path: Path) -> None:
    await world.create_run(raas=constant(2.0), max_attempts=1, max_abs_reward=2)
    await world.trainer()
    await world.submit("t1")
    async with local_node(world.address, tmp_path):
        await world.until(lambda status: status.trajectories.ingested == 2)
