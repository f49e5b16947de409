"""Groups: whole or not at all, through filters, closed k of n, and settled after any crash."""

import asyncio

from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import CompleteTask
from support.dataflow_world import Node, World, make_trajectory

DROP_EQUAL = '["astraflow_dataflow.plugins.filters.drop_zero_advantage:DropZeroAdvantage"]'


async def settled(world: World, count: int) -> None:
    """Wait until `count` trajectories left assembling."""
    await world.until(lambda status: status.trajectories.ingested - status.trajectories.assembling >= count)


async def test_a_group_is_not_visible_before_its_last_member(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=1, group_size=3)
    (lease,) = await node.lease()
    for member in (0, 1):
        await node.push(node.episode(lease, member))
        assert not (await trainer.acquire(1, wait_s=0)).HasField("batch")
    await node.push(node.episode(lease, 2))
    assert len((await trainer.acquire(1)).batch.items) == 3


async def test_a_filter_drops_a_group_whole_and_lowers_acceptance(world: World) -> None:
    _, node = await world.started(dataset="Counting", filters=DROP_EQUAL)
    await node.work(2, reward=1.0)
    await settled(world, 4)
    assert (await world.status()).policies[0].acceptance < 1
    await world.has_account(dropped={"filtered": 4})


async def test_a_lower_acceptance_leases_more_groups_than_a_step_needs(world: World) -> None:
    _, node = await world.started(
        dataset="Counting", filters=DROP_EQUAL, max_staleness=0, groups_per_step=2, min_acceptance=0.25
    )
    for _ in range(12):
        await node.work(16, reward=1.0)
        await asyncio.sleep(0.02)
    await settled(world, 8)
    assert len(await node.lease(16)) > 2


async def test_a_failed_member_drops_the_group_unless_the_recipe_allows_fewer(world: World) -> None:
    _, node = await world.started(dataset="Counting")
    (lease,) = await node.lease()
    await node.push(node.episode(lease, 0))
    await node.push(node.episode(lease, 1, failed=True))
    await settled(world, 1)
    await world.has_account(dropped={"incomplete": 1})


async def test_a_group_is_closed_with_k_of_n_where_the_recipe_allows_it(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", min_members=1, groups_per_step=1, max_attempts=1)
    (lease,) = await node.lease()
    await node.push(node.episode(lease, 0))
    await node.fail(lease, "workflow_error")  # dead letter: the missing member will never come
    batch = (await trainer.acquire(1)).batch
    assert [item.task_id for item in batch.items] == [lease.task.task_id]


async def test_a_task_whose_group_is_used_with_k_of_n_leaves_no_dead_letter(world: World) -> None:
    trainer, node = await world.started("t1", min_members=1, groups_per_step=1, max_attempts=1)
    (lease,) = await node.lease()
    await node.push(node.episode(lease, 0))
    await node.fail(lease, "workflow_error")
    await settled(world, 1)
    # Requeued, it would be a second group of the same id in the place of the first.
    assert await world.requeue() == (0, 0, 0)
    assert await node.lease(wait_s=0.1) == []
    await world.has_account(ready=1, dropped={})
    await trainer.train(1, base_version=0)
    await world.has_account(trained=1)


async def test_trajectories_of_a_policy_without_credit_end_as_no_credit(world: World) -> None:
    both, version = ("solver", "verifier"), {"solver": 0, "verifier": 0}
    await world.create_run(dataset="Counting", policies=both, max_staleness=0, groups_per_step=1)
    solver, verifier = [await world.trainer(policy) for policy in both]
    node = await world.node()
    await node.work(policies=both, version=version)
    assert (await node.lease_reply()).waiting_for == "staleness_window"
    await solver.train(1, base_version=0)  # the verifier's trainer is dead: its window stays full
    version["solver"] = 1
    await node.work(policies=both, version=version)
    await solver.train(2, base_version=1)
    await world.has_account(dropped={"no_credit": 2})
    assert len((await verifier.acquire(1)).batch.items) == 2


async def test_groups_are_per_policy_and_role(world: World) -> None:
    roles = {"planner": "solver", "coder": "solver"}
    trainer, node = await world.started(dataset="Counting", groups_per_step=2, roles=roles)
    (lease,) = await node.lease()
    for member in lease.members:
        episode = node.episode(lease, member, policies=("solver", "solver"))
        for number, role in enumerate(roles):
            spoken = make_trajectory(f"{episode.episode_id}.{role}", role=role)
            episode.trajectories[number].CopyFrom(spoken)
        await node.push(episode)
    batch = (await trainer.acquire(1)).batch
    assert sorted({item.group_id: item.role for item in batch.items}.values()) == ["coder", "planner"]


async def committed(world: World, node: Node, lease: task_pb2.Lease) -> CompleteTask:
    """What a server holds that dies between the last commit and the settling."""
    episodes = [node.episode(lease, member) for member in lease.members]
    _, (completed,) = await world.dataflow.store.episodes.commit("run", episodes, horizon_s=60.0)
    return completed


async def test_a_task_left_complete_by_a_crash_is_settled_by_any_server(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=1)
    (lease,) = await node.lease()
    await committed(world, node, lease)
    assert len((await trainer.acquire(1, wait_s=15)).batch.items) == 2


async def test_settling_twice_acts_once(world: World) -> None:
    _, node = await world.started(dataset="Counting", groups_per_step=1)
    (lease,) = await node.lease()
    task, context = await committed(world, node, lease), await world.dataflow.registry.get("run")
    acted = [await world.dataflow.settling.settle(context, [task]) for _ in range(2)]
    assert sorted(acted) in ([0, 0], [0, 1])  # the run loop may have been first
    await world.has_account(ready=2)


async def test_an_episode_without_trajectories_is_fine(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=1)
    (lease,) = await node.lease()
    await node.push(node.episode(lease, 0, policies=()))
    await node.push(node.episode(lease, 1))
    assert len((await trainer.acquire(1)).batch.items) == 1


async def test_the_recent_reward_is_the_mean_of_the_last_groups(world: World) -> None:
    _, node = await world.started(dataset="Counting", groups_per_step=1, max_staleness=3)
    for reward in (0.0, 1.0, 0.5):
        await node.work(reward=reward)
    await settled(world, 6)
    assert (await world.status()).policies[0].recent_training_reward == 0.5
