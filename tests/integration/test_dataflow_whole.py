"""All of a task in one push: it is judged before the commit and settled by it, and kept is what its episodes keep that
are pushed one by one. Where it is not as its server knew it, it is committed as any other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from astraflow.errors import NotFoundError
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.store.episodes.commits import EpisodeStore
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_texts
from support.dataflow_kept import kept, settled, times_to_live
from support.dataflow_world import Node, World, make_episode, outcome_name, served

SIZE = 4
TASKS = ("t1", "t2", "t3")
DROP_EQUAL = '["astraflow_dataflow.plugins.filters.drop_zero_advantage:DropZeroAdvantage"]'
EVERY_OTHER = '["support.data_plugins:EveryOther"]'
RECIPES: dict[str, dict[str, object]] = {
    "ready": {},
    "filtered": {"filters": DROP_EQUAL},
    "dropped": {"routes": "[{name: all, when: {min_reward: -9}, to: drop}]"},
    "evaluated": {"routes": "[{name: all, when: {min_reward: -9}, to: evaluation}]"},
    "archived": {"filters": DROP_EQUAL, "archive": "{keep: [dropped]}"},
    "two policies": {"policies": ("solver", "critic"), "roles": {"solver": "solver", "critic": "critic"}},
}


async def scene(world: World, name: str = "run", **recipe: object) -> Node:
    """A run with three leased tasks."""
    sizes = {"group_size": SIZE, "groups_per_step": 8}
    _, node = await world.started(*TASKS, name=name, **(sizes | recipe))
    if "critic" in recipe.get("policies", ()):  # type: ignore[operator]
        await world.trainer("critic")
    assert len(await node.lease(3)) == 3
    return node


def members(task_id: str = "t1", **fields: object) -> list[Episode]:
    """All episodes of a task."""
    return [
        make_episode(**({"run_id": "run", "task_id": task_id, "member": member} | fields))  # type: ignore[arg-type]
        for member in range(SIZE)
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the store of episodes, in order."""
    asked = list[str]()
    for name in ("commit_whole", "commit", "settle"):
        method = getattr(EpisodeStore, name)

        def noted(
            *given: object, name: str = name, method: Callable[..., object] = method, **more: object
        ) -> object:
            asked.append(name)
            return method(*given, **more)

        monkeypatch.setattr(EpisodeStore, name, noted)
    return asked


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("name", RECIPES)
async def test_a_whole_task_keeps_what_its_episodes_keep_that_are_pushed_singly(
    redis_url: str, tmp_path: Path, calls: list[str], name: str, outside: bool
) -> None:
    where = {"payloads": f"file://{tmp_path}/payloads"} if outside else {}
    contents = list[dict[str, object]]()
    recipe = RECIPES[name]
    policies = recipe.get("policies", ("solver",))
    async with served(redis_url, tmp_path, **where) as world:
        for way in ("singly", "packed"):
            node = await scene(world, way, **recipe)
            calls.clear()
            for reward, task_id in enumerate(TASKS[:2]):
                whole = [
                    make_episode(
                        run_id=way,
                        task_id=task_id,
                        member=member,
                        reward=float(reward * member),
                        policies=policies,  # type: ignore[arg-type]
                        metrics={"environment.tool_calls": 2.0, "environment.tool_errors": 1.0},
                    )
                    for member in range(SIZE)
                ]
                results = (
                    await node.pack(*whole) if way == "packed" else [await node.push(one) for one in whole]
                )
                assert [outcome_name(result) for result in results] == ["ACCEPTED"] * SIZE
                await settled(world)
            found = await kept(world, TASKS)
            contents.append({part: str(held).replace(way, "run") for part, held in found.items()})
            assert (await world.status()).trajectories.conservation_error == 0
        assert calls == ["commit_whole", "commit_whole"]
    assert contents[0] == contents[1]


async def test_tasks_of_one_push_are_settled_together(world: World, calls: list[str]) -> None:
    node = await scene(world)
    results = await node.pack(*members("t1"), *members("t2"))
    assert [outcome_name(result) for result in results] == ["ACCEPTED"] * (2 * SIZE)
    assert calls == ["commit_whole"]
    assert len({result.position for result in results}) == 1
    await world.has_account(ready=2 * SIZE)


async def test_others_in_a_push_are_committed_with_them(world: World, calls: list[str]) -> None:
    node = await scene(world)
    results = await node.pack(*members("t1"), members("t2")[0])
    assert [outcome_name(result) for result in results] == ["ACCEPTED"] * (SIZE + 1)
    await settled(world)
    assert calls == ["commit", "settle"]
    await world.has_account(ready=SIZE, assembling=1)


def changed(*command: str | int) -> Callable[[World, Node], Awaitable[object]]:
    """The task is changed in Redis."""

    async def change(world: World, _: Node) -> object:
        return await world.dataflow.connection.raw(command[0], Keys("run").of("task", "t1"), *command[1:])

    return change


async def refused(_: World, node: Node) -> object:
    """An episode of the task was refused."""
    poison = make_episode(run_id="run", task_id="t1", member=2, episode_id="bad", reward=float("nan"))
    return await node.push(poison)


async def switched(world: World, _: Node) -> None:
    """This server does not know yet which plug-ins hold."""
    context = await world.dataflow.registry.get("run")
    context.switch = 7


async def taken(_: World, node: Node) -> None:
    """A trajectory of the same id is another task's."""
    other = make_episode(run_id="run", task_id="t2", member=0)
    other.trajectories[0].CopyFrom(members()[1].trajectories[0])
    assert await node.outcome(other) == "ACCEPTED"


async def finishing(world: World, _: Node) -> None:
    """The run ends."""
    await world.finish()


ALL = ["ACCEPTED"] * SIZE
CHANGES: dict[str, tuple[Callable[[World, Node], Awaitable[object]], Sequence[str]]] = {
    "leased again": (changed("HSET", "attempt", 2), ["ACCEPTED_LATE"] * SIZE),
    "leased to another node": (changed("HSET", "node", "n2"), ALL),
    "given back": (changed("HSET", "state", "retry"), ALL),
    "with a copy": (changed("HSET", "copy", "2 n2"), ALL),
    "without credit for a role": (changed("HSET", "uncredited", "solver"), ALL),
    "of another size": (changed("HSET", "size", SIZE + 1, "left", SIZE + 1), ALL),
    "refused before": (refused, ALL),
    "of other plug-ins": (switched, ALL),
    "with an id that is taken": (taken, ["ACCEPTED", "POISON", "ACCEPTED", "ACCEPTED"]),
    "of a run that ends": (finishing, ["LATE_CLOSED"] * SIZE),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_whole_task_that_is_otherwise_is_committed_as_any_other(
    world: World, calls: list[str], name: str
) -> None:
    node = await scene(world)
    change, expected = CHANGES[name]
    await change(world, node)
    calls.clear()
    results = await node.pack(*members("t1"))
    assert [outcome_name(result) for result in results] == expected
    assert calls[:2] == ["commit_whole", "commit"]
    await settled(world)
    status = await world.status()
    assert status.trajectories.conservation_error == 0
    num_kept = sum(1 for outcome in expected if outcome.startswith("ACCEPTED"))
    lasting = [left for left in await times_to_live(world) if left == -1]
    assert len(lasting) == num_kept + (name == "with an id that is taken")


async def test_what_other_tasks_are_costs_one_that_is_as_it_was_nothing(
    world: World, calls: list[str]
) -> None:
    node = await scene(world)
    await world.dataflow.connection.raw("SET", Keys("run").of("task", "t2"), "not a hash")
    await refused(world, node)
    results = await node.pack(*members("t1"), *members("t2"), *members("t3"))
    assert [outcome_name(result) for result in results] == [*ALL, *["RETRY"] * SIZE, *ALL]
    assert calls[:2] == ["commit_whole", "commit"]
    await settled(world)
    ready = await world.dataflow.connection.raw("ZRANGE", Keys("run").of("ready", "solver"), 0, -1)
    assert sorted(as_texts(ready)) == ["t1/solver", "t3/solver"]


async def test_what_is_damaged_is_said(world: World) -> None:
    node = await scene(world)
    await world.dataflow.connection.raw("SET", Keys("run").of("trace", "t1"), "not a list")
    results = await node.pack(*members("t1"), *members("t2"))
    assert [outcome_name(result) for result in results] == [*["RETRY"] * SIZE, *ALL]
    assert results[0].reason == "INTERNAL"


async def test_a_filter_that_keeps_a_state_is_asked_once(world: World, calls: list[str]) -> None:
    node = await scene(world, filters=EVERY_OTHER)
    for task_id in TASKS:
        await node.pack(*members(task_id))
        await settled(world)
    assert calls == ["commit", "settle"] * len(TASKS)
    await world.has_account(ready=2 * SIZE, dropped={"filtered": SIZE})


async def test_a_repeated_push_of_a_whole_task_is_answered_as_any(world: World, calls: list[str]) -> None:
    node = await scene(world)
    await node.pack(*members("t1"))
    calls.clear()
    results = await node.pack(*members("t1"))
    assert [outcome_name(result) for result in results] == ["DUPLICATE"] * SIZE
    assert calls == ["commit"]
    assert await times_to_live(world) == [-1] * SIZE


async def test_pushed_twice_at_once_it_is_taken_once(world: World) -> None:
    node = await scene(world)
    answers = await asyncio.gather(*(node.pack(*members("t1")) for _ in range(4)))
    names = sorted(outcome_name(result) for results in answers for result in results)
    assert names == [*ALL, *["DUPLICATE"] * (3 * SIZE)]
    await world.has_account(ready=SIZE)
    assert await times_to_live(world) == [-1] * SIZE


async def test_of_a_run_that_is_gone_nothing_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await scene(world)
    commit_whole = Settling.commit_whole

    async def late(settling: Settling, context: object, tasks: object) -> object:
        await world.dataflow.connection.raw("HSET", Keys("run").of("run"), "state", "deleting")
        return await commit_whole(settling, context, tasks)  # type: ignore[arg-type]

    monkeypatch.setattr(Settling, "commit_whole", late)
    with pytest.raises(NotFoundError):
        await node.pack(*members("t1"))
    assert await times_to_live(world) == []
