"""What a hostile or mistaken caller sends: refused at once, and no run, nor the server, is the worse for it."""

import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.errors import InvalidArgumentError, PreconditionError, RecipeError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.runs import registry
from astraflow_dataflow.servicers import task_servicer
from support.any_rpc import answer, request_of
from support.dataflow_world import World, recipe_text, served
from support.redis_content import redis_content

pytestmark = pytest.mark.integration

BEYOND, MOST = 2**53 + 1, 2**53
HEADER = trajectory_pb2.TrajectoryHeader(max_version=BEYOND)
EPISODE = trajectory_pb2.Episode(
    run_id="run",
    task_id="t",
    trajectories=[trajectory_pb2.TrajectoryItem(), trajectory_pb2.TrajectoryItem(header=HEADER)],
)
REQUESTS: dict[str, Message] = {
    "known_epoch": request_of(batches.ClaimPolicyRequest, known_epoch=2**64 - 1),
    "serving_versions[solver]": request_of(
        tasks.LeaseTasksRequest, max_tasks=1, serving_versions={"solver": BEYOND}
    ),
    "episode.trajectories[1].header.max_version": pushes.PushEpisodeRequest(episode=EPISODE),
}


@pytest.mark.parametrize("field", REQUESTS)
async def test_an_integer_that_lua_cannot_hold_is_refused_by_name(
    world: World, redis_url: str, field: str
) -> None:
    await world.create_run()
    await world.node()
    await world.until(lambda status: [item.complete for item in status.evaluations] in ([], [True]))
    request = REQUESTS[field]
    before = redis_content(redis_url)
    with pytest.raises(InvalidArgumentError) as refused:
        await answer(world, request)
    assert f"{type(request).__name__}.{field} is" in refused.value.message
    assert "at most 9007199254740992" in refused.value.message
    assert redis_content(redis_url) == before


@pytest.mark.parametrize("node_id", ["n\n1", "n\t1"])
async def test_an_episode_of_a_node_with_a_line_break_in_its_name_leaves_the_trace_readable(
    world: World, node_id: str
) -> None:
    _, node = await world.started("t1")
    (lease,) = await node.lease()
    episode = node.episode(lease, 0)
    episode.node_id = node_id
    with pytest.raises(InvalidArgumentError, match=r"episode.node_id is 'n\\[nt]1'"):
        await node.push(episode)
    assert (await world.why("t1")).task.task_id == "t1"


async def test_a_page_token_is_a_number_that_redis_takes(world: World) -> None:
    for token in ("9" * 5000, "²", str(BEYOND)):
        with pytest.raises(InvalidArgumentError, match="page_token"):
            await world.ask(runs.ListRunsResponse, page_token=token)


async def test_hostile_recipes_and_data_are_read_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    for module, name in ((registry, "parse_recipe"), (task_servicer, "task_problem")):
        function = getattr(module, name)

        def noted(*given: object, function: Any = function, name: str = name, **named: object) -> object:
            threads.add(f"{name} {threading.current_thread() is threading.main_thread()}")
            return function(*given, **named)

        monkeypatch.setattr(module, name, noted)
    run = run_pb2.Run(run_id="hostile", recipe_yaml="[" * 20_000)
    with pytest.raises(RecipeError, match="nested deeper than 32"):
        await world.ask(runs.CreateRunResponse, run=run)
    await world.create_run()
    task = task_pb2.Task(task_id="t", data_json=b"[" * 60_000)
    with pytest.raises(InvalidArgumentError, match="recursion limit"):
        await world.ask(tasks.SubmitTasksResponse, tasks=[task])
    assert threads == {"parse_recipe False", "task_problem False"}


async def spoilt(world: World, run_id: str, key: str, field: str, value: str) -> None:
    """Redis holds something else in a field of a run."""
    await world.dataflow.connection.raw("HSET", f"af:{{{run_id}}}:{key}", field, value)


SPOILT: dict[str, tuple[str, str, str]] = {
    "an epoch": ("policy:solver", "epoch", "1.8446744073709552e+19"),
    "a state": ("run", "state", "asleep"),
    "a bundle": ("run", "code", "\xff\xff"),
    "a counter": ("counters", "ingested", "many"),
}


@pytest.mark.parametrize("what", SPOILT)
async def test_a_run_that_cannot_be_read_takes_no_other_with_it(
    redis_url: str, tmp_path: Path, what: str
) -> None:
    key, field, value = SPOILT[what]
    async with served(redis_url, tmp_path) as world:
        await world.create_run()
        await world.ask(
            runs.CreateRunResponse, run=run_pb2.Run(run_id="sound", recipe_yaml=recipe_text(name="sound"))
        )
        await spoilt(world, "run", key, field, value)
    async with served(redis_url, tmp_path) as world:
        world.run_id = "sound"
        assert (await world.status()).run_id == "sound"
        world.run_id = "run"
        for ask in (world.status, world.why):
            with pytest.raises(PreconditionError, match=r"run run .*astraflow runs delete run --force"):
                await ask()
        listed = await world.ask(runs.ListRunsResponse)
        assert [run.run_id for run in listed.runs] == ["run", "sound"]
        assert "astraflow runs delete run" in str((await world.dataflow.status())["runs"]["run"])  # type: ignore[index]
        await world.ask(runs.DeleteRunResponse, run_id="run", force=True)
        assert [run.run_id for run in (await world.ask(runs.ListRunsResponse)).runs] == ["sound"]
