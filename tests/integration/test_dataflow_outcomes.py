"""The outcome table of a push, cell by cell: what the member is × which attempt pushes."""

from __future__ import annotations

import pytest

from astraflow.dataflow.v1 import trajectory_service_pb2
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from support.dataflow_world import Node, World

CURRENT, OLDER, HEDGE = "current", "older", "hedge"


async def leased_twice(world: World, *, group_size: int = 2) -> tuple[Node, task_pb2.Lease, task_pb2.Lease]:
    """A task whose first lease was given back, so that attempt 1 is older and attempt 2 current."""
    await world.create_run(group_size=group_size)
    await world.trainer()
    node = await world.node()
    await world.submit("t1")
    (first,) = await node.lease()
    assert await node.fail(first, "workflow_error")
    (second,) = await node.lease()
    assert (first.attempt, second.attempt) == (1, 2)
    return node, first, second


def lease_for(attempt: str, first: task_pb2.Lease, second: task_pb2.Lease) -> task_pb2.Lease:
    """The lease an episode of this kind of attempt runs under."""
    return first if attempt == OLDER else second


async def outcome(node: Node, episode: trajectory_pb2.Episode) -> str:
    """Push and return the outcome's name."""
    result = await node.push(episode)
    return trajectory_service_pb2.Outcome.Name(result.outcome).removeprefix("OUTCOME_")


@pytest.mark.parametrize(
    ("attempt", "expected"), [(CURRENT, "ACCEPTED"), (OLDER, "ACCEPTED_LATE"), (HEDGE, "ACCEPTED")]
)
async def test_an_empty_member_takes_any_good_work(world: World, attempt: str, expected: str) -> None:
    node, first, second = await leased_twice(world)
    lease = lease_for(attempt, first, second)
    assert await outcome(node, node.episode(lease, 0, hedge=attempt == HEDGE)) == expected
    account = (await world.status()).trajectories
    assert (account.ingested, account.assembling, account.conservation_error) == (1, 1, 0)


@pytest.mark.parametrize("attempt", [CURRENT, OLDER, HEDGE])
async def test_the_same_episode_again_is_a_duplicate_and_not_counted(world: World, attempt: str) -> None:
    node, first, second = await leased_twice(world)
    lease = lease_for(attempt, first, second)
    episode = node.episode(lease, 0, episode_id="e", hedge=attempt == HEDGE)
    await outcome(node, episode)
    assert await outcome(node, episode) == "DUPLICATE"
    assert (await world.status()).trajectories.ingested == 1


@pytest.mark.parametrize(
    ("attempt", "expected", "reason"),
    [
        (CURRENT, "SUPERSEDED", "superseded"),
        (OLDER, "FENCED", "fenced"),
        (HEDGE, "SUPERSEDED", "superseded"),
    ],
)
async def test_a_filled_member_keeps_what_it_has(
    world: World, attempt: str, expected: str, reason: str
) -> None:
    node, first, second = await leased_twice(world)
    await outcome(node, node.episode(second, 0, episode_id="winner", reward=1.0))
    lease = lease_for(attempt, first, second)
    loser = node.episode(lease, 0, episode_id="loser", hedge=attempt == HEDGE)
    assert await outcome(node, loser) == expected
    assert await outcome(node, loser) == expected  # repeating changes nothing and counts nothing
    account = (await world.status()).trajectories
    assert dict(account.dropped) == {reason: 1}
    assert (account.ingested, account.assembling, account.conservation_error) == (2, 1, 0)


@pytest.mark.parametrize("attempt", [CURRENT, OLDER, HEDGE])
async def test_a_closed_group_takes_nothing_more(world: World, attempt: str) -> None:
    node, first, second = await leased_twice(world)
    await node.fail(second, "workflow_error", retryable=False)  # dead letter: the group is closed
    lease = lease_for(attempt, first, second)
    assert await outcome(node, node.episode(lease, 0, hedge=attempt == HEDGE)) == "LATE_CLOSED"
    account = (await world.status()).trajectories
    assert dict(account.dropped) == {"late_closed": 1}
    assert account.conservation_error == 0


async def test_a_member_filled_before_its_group_closed_still_answers_duplicate(world: World) -> None:
    node, _, second = await leased_twice(world)
    episode = node.episode(second, 0)
    await outcome(node, episode)
    await outcome(node, node.episode(second, 1))
    assert await outcome(node, episode) == "DUPLICATE"


async def test_an_unknown_task_is_late_and_counted(world: World) -> None:
    node, _, second = await leased_twice(world)
    result = await node.push(node.episode(second, 0, task_id="never-submitted"))
    assert (result.outcome, result.reason) == (trajectory_service_pb2.OUTCOME_LATE_CLOSED, "unknown_task")
    assert (await world.status()).trajectories.conservation_error == 0


async def test_a_member_beyond_the_group_is_poison(world: World) -> None:
    node, _, second = await leased_twice(world)
    result = await node.push(node.episode(second, 2))
    assert (result.outcome, result.reason) == (trajectory_service_pb2.OUTCOME_POISON, "member_out_of_range")


async def test_a_trajectory_id_of_another_episode_is_poison_and_leaves_the_first_untouched(
    world: World,
) -> None:
    node, _, second = await leased_twice(world)
    first = node.episode(second, 0, episode_id="a")
    await outcome(node, first)
    thief = node.episode(second, 1, episode_id="b")
    thief.trajectories[0].CopyFrom(first.trajectories[0])
    result = await node.push(thief)
    assert (result.outcome, result.reason) == (trajectory_service_pb2.OUTCOME_POISON, "duplicate_id")
    account = (await world.status()).trajectories
    assert (account.ingested, account.assembling, dict(account.dropped)) == (2, 1, {"poison": 1})


async def test_poison_is_quarantined_once_and_leaves_the_member_open(world: World) -> None:
    node, _, second = await leased_twice(world)
    bad = node.episode(second, 0, episode_id="bad", reward=float("nan"))
    for _ in range(2):
        result = await node.push(bad)
        assert (result.outcome, result.reason) == (trajectory_service_pb2.OUTCOME_POISON, "nan_reward")
    assert await outcome(node, node.episode(second, 0, episode_id="good")) == "ACCEPTED"
    account = (await world.status()).trajectories
    assert (account.ingested, dict(account.dropped), account.conservation_error) == (2, {"poison": 1}, 0)


async def test_an_episode_id_that_was_refused_is_not_accepted_with_other_content(world: World) -> None:
    node, _, second = await leased_twice(world)
    await node.push(node.episode(second, 0, episode_id="e", reward=float("inf")))
    assert await outcome(node, node.episode(second, 0, episode_id="e")) == "POISON"


async def test_a_failed_episode_fills_its_member_without_trajectories(world: World) -> None:
    node, _, second = await leased_twice(world)
    failed = node.episode(second, 0, failed=True)
    assert await outcome(node, failed) == "ACCEPTED"
    assert await outcome(node, failed) == "DUPLICATE"
    assert (await world.status()).trajectories.ingested == 0


@pytest.mark.parametrize("member", [1, 0])
async def test_an_episode_pushed_again_under_another_member_touches_nothing_it_has(
    world: World, member: int
) -> None:
    node, _, second = await leased_twice(world, group_size=3)
    episode = node.episode(second, 2, episode_id="e")
    assert await outcome(node, episode) == "ACCEPTED"
    if member == 0:  # filled by another episode: superseded, which frees what was uploaded for it
        await outcome(node, node.episode(second, 0, episode_id="other"))
    again = node.episode(second, member, episode_id="e")
    assert await outcome(node, again) in ("POISON", "SUPERSEDED")
    names = await world.dataflow.store.batches.payloads("run", ["e.solver"])
    assert names == [episode.trajectories[0].body]
    assert (await world.status()).trajectories.conservation_error == 0
