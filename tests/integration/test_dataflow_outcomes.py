"""The outcome table of a push, cell by cell: what the member is × which attempt pushes."""

import pytest

from astraflow.dataflow.v1.trajectory_service_pb2 import Outcome
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from support.dataflow_world import Node, World

CURRENT, OLDER, HEDGE = "current", "older", "hedge"


async def leased_twice(world: World, *, group_size: int = 2) -> tuple[Node, task_pb2.Lease, task_pb2.Lease]:
    """A task whose first lease was given back, so that attempt 1 is older and attempt 2 current."""
    _, node = await world.started("t1", group_size=group_size)
    (first,) = await node.lease()
    assert await node.fail(first, "workflow_error")
    (second,) = await node.lease()
    assert (first.attempt, second.attempt) == (1, 2)
    return node, first, second


def pushed(node: Node, attempt: str, first: task_pb2.Lease, second: task_pb2.Lease) -> trajectory_pb2.Episode:
    """An episode of member 0 under this kind of attempt."""
    lease = first if attempt == OLDER else second
    return node.episode(lease, 0, episode_id="e", hedge=attempt == HEDGE)


async def refused(node: Node, episode: trajectory_pb2.Episode) -> tuple[str, str]:
    """Push; the outcome's name and the reason."""
    result = await node.push(episode)
    return Outcome.Name(result.outcome).removeprefix("OUTCOME_"), result.reason


@pytest.mark.parametrize(
    ("attempt", "expected"), [(CURRENT, "ACCEPTED"), (OLDER, "ACCEPTED_LATE"), (HEDGE, "ACCEPTED")]
)
async def test_an_empty_member_takes_any_good_work_and_counts_it_once(
    world: World, attempt: str, expected: str
) -> None:
    node, first, second = await leased_twice(world)
    episode = pushed(node, attempt, first, second)
    assert [await node.outcome(episode) for _ in range(2)] == [expected, "DUPLICATE"]
    await world.has_account(ingested=1, assembling=1)


@pytest.mark.parametrize(
    ("attempt", "expected"), [(CURRENT, "SUPERSEDED"), (OLDER, "FENCED"), (HEDGE, "SUPERSEDED")]
)
async def test_a_filled_member_keeps_what_it_has(world: World, attempt: str, expected: str) -> None:
    node, first, second = await leased_twice(world)
    await node.outcome(node.episode(second, 0, episode_id="winner", reward=1.0))
    loser = pushed(node, attempt, first, second)
    assert await node.outcome(loser) == expected
    assert await node.outcome(loser) == expected  # repeating changes nothing and counts nothing
    await world.has_account(dropped={expected.lower(): 1}, ingested=2, assembling=1)


@pytest.mark.parametrize("attempt", [CURRENT, OLDER, HEDGE])
async def test_a_closed_group_takes_nothing_more(world: World, attempt: str) -> None:
    node, first, second = await leased_twice(world)
    await node.fail(second, "workflow_error", retryable=False)  # dead letter: the group is closed
    assert await node.outcome(pushed(node, attempt, first, second)) == "LATE_CLOSED"
    await world.has_account(dropped={"late_closed": 1})


async def test_a_member_filled_before_its_group_closed_still_answers_duplicate(world: World) -> None:
    node, _, second = await leased_twice(world)
    episode = node.episode(second, 0)
    await node.outcome(episode)
    await node.outcome(node.episode(second, 1))
    assert await node.outcome(episode) == "DUPLICATE"


async def test_a_member_beyond_the_group_is_poison(world: World) -> None:
    node, _, second = await leased_twice(world)
    assert await refused(node, node.episode(second, 2)) == ("POISON", "member_out_of_range")


async def test_a_trajectory_id_of_another_episode_is_poison_and_leaves_the_first_untouched(
    world: World,
) -> None:
    node, _, second = await leased_twice(world)
    first = node.episode(second, 0, episode_id="a")
    await node.outcome(first)
    thief = node.episode(second, 1, episode_id="b")
    thief.trajectories[0].CopyFrom(first.trajectories[0])
    assert await refused(node, thief) == ("POISON", "duplicate_id")
    await world.has_account(ingested=2, assembling=1, dropped={"poison": 1})


async def test_poison_is_quarantined_once_and_leaves_the_member_open(world: World) -> None:
    node, _, second = await leased_twice(world)
    bad = node.episode(second, 0, episode_id="bad", reward=float("nan"))
    for _ in range(2):
        assert await refused(node, bad) == ("POISON", "nan_reward")
    assert await node.outcome(node.episode(second, 0, episode_id="good")) == "ACCEPTED"
    await world.has_account(ingested=2, dropped={"poison": 1})


async def test_an_episode_id_that_was_refused_is_not_accepted_with_other_content(world: World) -> None:
    node, _, second = await leased_twice(world)
    await node.push(node.episode(second, 0, episode_id="e", reward=float("inf")))
    assert await node.outcome(node.episode(second, 0, episode_id="e")) == "POISON"


async def test_a_failed_episode_fills_its_member_without_trajectories(world: World) -> None:
    node, _, second = await leased_twice(world)
    failed = node.episode(second, 0, failed=True)
    assert await node.outcome(failed) == "ACCEPTED"
    assert await node.outcome(failed) == "DUPLICATE"
    await world.has_account(ingested=0)


@pytest.mark.parametrize("member", [1, 0])
async def test_an_episode_pushed_again_under_another_member_touches_nothing_it_has(
    world: World, member: int
) -> None:
    node, _, second = await leased_twice(world, group_size=3)
    episode = node.episode(second, 2, episode_id="e")
    assert await node.outcome(episode) == "ACCEPTED"
    if member == 0:  # filled by another episode: superseded, which frees what was uploaded for it
        await node.outcome(node.episode(second, 0, episode_id="other"))
    again = node.episode(second, member, episode_id="e")
    assert await node.outcome(again) in ("POISON", "SUPERSEDED")
    payloads = world.dataflow.store.payloads
    assert await payloads.read("run", await payloads.places("run", ["e.solver"])) == [
        episode.trajectories[0].body
    ]
    await world.has_account()
