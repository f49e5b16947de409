"""Several episodes in one push: what is kept, and what is answered, is that of the same episodes pushed one by one."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.errors import InternalError
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.inside import UNCOMMITTED_S, call_with
from astraflow_dataflow.store.replies import as_mapping
from support.dataflow_kept import kept, settled, times_to_live
from support.dataflow_world import Node, World, make_episode, make_trajectory, outcome_name

SIZE = 4
TASKS = ("t1", "t2", "t3", "unsubmitted")
POISON = float("nan")


def drawn(draw: random.Random, run_id: str) -> list[Episode]:
    """Episodes of which some repeat, some are late, some are not wanted, some are nonsense, and some have two
    trajectories.
    """
    episodes = list[Episode]()
    for number in range(40):
        member = draw.randrange(SIZE)
        fields: dict[str, Any] = {
            "task_id": draw.choices(TASKS, (9, 9, 9, 1))[0],
            "member": member if draw.random() < 0.95 else SIZE,
            "attempt": draw.choices((1, 0), (9, 1))[0],
            "episode_id": f"e{number}",
            "hedge": draw.random() < 0.1,
            "failed": draw.random() < 0.1,
            "reward": POISON if draw.random() < 0.05 else float(member),
            "version": 99 if draw.random() < 0.05 else 0,
            "metrics": {"environment.tool_calls": 2.0} if draw.random() < 0.2 else None,
        }
        fresh = make_episode(run_id=run_id, **fields)
        if fresh.trajectories and number % 10 >= 7:  # so that some that follow each other have two
            second = make_trajectory(f"e{number}.second", policy_id="solver", reward=1.0)
            fresh.trajectories.append(second)
        repeats = episodes and draw.random() < 0.2
        episodes.append(draw.choice(episodes) if repeats else fresh)
    return episodes


def packs(draw: random.Random, episodes: Sequence[Episode]) -> list[Sequence[Episode]]:
    """The episodes of each task together, as a node has them, in packs of any size."""
    ordered = sorted(episodes, key=lambda episode: episode.task_id)
    cuts = sorted(draw.sample(range(1, len(ordered)), 5))
    return [ordered[first:last] for first, last in zip([0, *cuts], [*cuts, len(ordered)], strict=True)]


def apart(packs: Sequence[Sequence[Episode]]) -> list[Sequence[Episode]]:
    """The same episodes in the same order, but nothing of a member, or twice, in one pack: most of one are taken at
    once.
    """
    cut = list[list[Episode]]()
    for pack in packs:
        cut.append([])
        for one in pack:
            there = {(each.task_id, each.member) for each in cut[-1]} | {each.episode_id for each in cut[-1]}
            if there & {(one.task_id, one.member), one.episode_id}:
                cut.append([])
            cut[-1].append(one)
    return list(cut)


async def scene(world: World, name: str) -> Node:
    """A run with three leased tasks."""
    _, node = await world.started(*TASKS[:3], name=name, group_size=SIZE, groups_per_step=8)
    assert len(await node.lease(3)) == 3
    return node


@pytest.mark.parametrize("cut", [list, apart], ids=["repeats", "apart"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_pack_keeps_what_its_episodes_keep_that_are_pushed_singly(
    world: World, seed: int, cut: Callable[[Sequence[Sequence[Episode]]], Sequence[Sequence[Episode]]]
) -> None:
    outcomes, contents = list[Counter[tuple[str, str, str]]](), list[dict[str, object]]()
    for name in ("singly", "packed"):
        node, draw = await scene(world, name), random.Random(seed)
        answers = Counter[tuple[str, str, str]]()
        for pack in cut(packs(draw, drawn(draw, name))):
            results = await node.pack(*pack) if name == "packed" else [await node.push(one) for one in pack]
            assert len(results) == len(pack)
            pushed = zip(pack, results, strict=True)
            answers.update((one.episode_id, outcome_name(answer), answer.reason) for one, answer in pushed)
        await settled(world)
        outcomes.append(answers)
        contents.append(
            {part: str(held).replace(name, "run") for part, held in (await kept(world, TASKS)).items()}
        )
        account = (await world.status()).trajectories
        assert account.conservation_error == 0, account
    assert outcomes[0] == outcomes[1]
    assert contents[0] == contents[1]


async def test_one_bad_episode_of_a_pack_costs_the_others_nothing(world: World) -> None:
    node = await scene(world, "run")
    good = [make_episode(run_id="run", task_id="t1", member=member) for member in range(SIZE)]
    unknown = make_episode(run_id="run", task_id="t2", member=0, version=1)
    poison = make_episode(run_id="run", task_id="t2", member=1, reward=POISON)
    twice = make_episode(run_id="run", task_id="t2", member=2)
    results = await node.pack(unknown, *good, poison, twice, twice)
    assert [outcome_name(result) for result in results] == [
        "RETRY", *["ACCEPTED"] * SIZE, "POISON", "ACCEPTED", "DUPLICATE",
    ]  # fmt: skip
    assert (results[0].reason, results[SIZE + 1].reason) == ("UNKNOWN_VERSION", "nan_reward")
    assert len({result.position for result in results if result.outcome == pushes.OUTCOME_ACCEPTED}) == 1
    await settled(world)
    await world.has_account(ready=SIZE, assembling=1, dropped={"poison": 1})


async def test_a_task_that_redis_holds_damaged_costs_the_others_nothing(world: World) -> None:
    node = await scene(world, "run")
    await world.dataflow.connection.raw("SET", Keys("run").of("task", "t2"), "not a hash")
    results = await node.pack(
        *(make_episode(run_id="run", task_id=task_id, member=0) for task_id in ("t1", "t2", "t3"))
    )
    assert [outcome_name(result) for result in results] == ["ACCEPTED", "RETRY", "ACCEPTED"]
    assert results[1].reason == "INTERNAL"
    assert await times_to_live(world) == [-1, -1, UNCOMMITTED_S], "what is not committed ends by itself"


async def test_what_came_before_does_not_keep_others_of_a_commit_from_being_stored(world: World) -> None:
    node = await scene(world, "run")
    first, *others = (make_episode(run_id="run", task_id="t1", member=member) for member in range(SIZE))
    place = Keys("run").of("payload", first.episode_id, first.trajectories[0].header.trajectory_id)
    await world.dataflow.connection.raw("SET", place, first.trajectories[0].body, "EX", UNCOMMITTED_S)
    results = await node.pack(first, *others)
    assert [outcome_name(result) for result in results] == ["ACCEPTED"] * SIZE
    assert await times_to_live(world) == [-1] * SIZE


async def test_payloads_of_what_is_refused_again_are_not_kept(world: World) -> None:
    node = await scene(world, "run")
    won = make_episode(run_id="run", task_id="t1", member=0, episode_id="won")
    lost = make_episode(run_id="run", task_id="t1", member=0, episode_id="lost")
    results = await node.pack(won, lost, lost)
    results += await node.pack(lost, won)
    names = ["ACCEPTED", *["SUPERSEDED"] * 3, "DUPLICATE"]
    assert [outcome_name(result) for result in results] == names
    assert await times_to_live(world) == [-1]


async def test_payloads_of_a_call_that_fails_end_by_themselves(world: World) -> None:
    await scene(world, "run")
    keys, connection = Keys("run"), world.dataflow.connection
    payloads = {keys.of("payload", "e", name): b"bytes" for name in ("one", "other")}
    with pytest.raises(InternalError):
        await call_with(connection, keys, payloads, "drain")  # without the arguments that it needs
    assert await times_to_live(world) == [UNCOMMITTED_S] * 2


async def test_all_members_in_one_push_are_one_record_of_their_task(world: World) -> None:
    node = await scene(world, "run")
    whole = [make_episode(run_id="run", task_id="t1", member=member) for member in range(SIZE)]
    results = await node.pack(*whole)
    assert [outcome_name(result) for result in results] == ["ACCEPTED"] * SIZE
    await settled(world)
    task = as_mapping(await world.dataflow.connection.raw("HGETALL", Keys("run").of("task", "t1")))
    assert task["whole"].split(b"\n") == [b"%d\t%s" % (one.member, one.episode_id.encode()) for one in whole]
    assert not [name for name in task if name.startswith("m")]
    again = [*await node.pack(*whole), await node.push(whole[2])]
    assert [outcome_name(result) for result in again] == ["DUPLICATE"] * (SIZE + 1)
    other = make_episode(run_id="run", task_id="t1", member=1, episode_id="other")
    assert outcome_name(await node.push(other)) == "SUPERSEDED"
    nonsense = make_episode(run_id="run", task_id="t1", member=1, reward=POISON)
    assert outcome_name(await node.push(nonsense)) == "DUPLICATE", "it keeps its first answer"
    await world.has_account(ready=SIZE, dropped={"superseded": 1})
