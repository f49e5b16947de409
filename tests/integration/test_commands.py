"""The commands that look at a run and operate it, against a real server."""

import asyncio
import json
import math
import os
import sys

import pytest

from astraflow.dataflow.v1 import task_service_pb2 as pb
from astraflow.rollout.v1.engine_load_pb2 import EngineLoad
from support.cli import Ended, run
from support.dataflow_world import World, until
from support.work_stream import working

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quiet")]


_JUDGED = "0 requeued, 0 unknown, 1 kept as they are\n"
"""Its groups are being settled at this moment."""


async def astraflow(world: World, *arguments: str, status: int = 0) -> Ended:
    """Run `astraflow ARGUMENTS --join SERVER` in a thread beside the server's loop; it ends with this status."""
    ended = await asyncio.to_thread(run, *arguments, "--join", world.address)
    assert ended.status == status, ended.errors
    return ended


async def _run(*arguments: str, **variables: str) -> Ended:
    """The same as a process, with further environment variables."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "astraflow.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | variables,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 100)
    return Ended(process.returncode or 0, output.decode(), errors.decode())


async def one_step(world: World) -> str:
    """A run in which one step was trained and published; returns a task that was in it."""
    trainer, node = await world.started(dataset="Unevaluated")
    await node.work(16)
    return (await trainer.train(1, base_version=0)).items[0].task_id


async def test_status_tells_people_and_programs_the_same(world: World) -> None:
    await one_step(world)
    told, parsed = await astraflow(world, "status"), await astraflow(world, "status", "--json")
    assert parsed.json["policies"][0]["last_finished_step"] == 1
    assert parsed.json["trajectories"]["conservation_error"] == 0
    assert "run run is active" in told.output
    assert "the figures add up" in told.output
    assert told.errors == ""


async def test_the_server_may_come_from_the_environment_and_is_then_named(world: World) -> None:
    await world.create_run()
    ended = await _run("status", ASTRAFLOW_JOIN=world.address)
    assert ended.status == 0
    assert ended.errors == f"asking {world.address} (ASTRAFLOW_JOIN)\n"


async def test_an_unknown_run_ends_with_its_reason_and_status_2(world: World) -> None:
    ended = await astraflow(world, "status", "--run-id", "nobody", status=2)
    assert ended.errors.startswith("NOT_FOUND: ")
    assert "Traceback" not in ended.errors


async def test_a_server_that_is_not_there_ends_with_status_75() -> None:
    ended = await asyncio.to_thread(run, "status", "--join", "127.0.0.1:1")
    assert ended.status == 75
    assert "no dataflow server answers at 127.0.0.1:1 (--join)" in ended.errors


async def test_watch_follows_until_the_run_is_finished(world: World) -> None:
    await world.create_run()
    following = asyncio.create_task(astraflow(world, "status", "--watch", "--json"))
    await asyncio.sleep(0.5)
    await world.finish()
    ended = await following
    states = [json.loads(line)["state"] for line in ended.output.splitlines()]
    assert states[-1] == "finished"


async def test_why_names_what_blocks_the_run_and_the_path_out(world: World) -> None:
    await world.create_run()
    told, parsed = await astraflow(world, "why"), await astraflow(world, "why", "--json")
    assert [words for words in ("blocked: no", "next: ") if words not in told.output] == []
    assert parsed.json["verdict"]["bound"] == "blocked"
    assert {wait["reason"] for wait in parsed.json["waits"]} == {"no_node", "no_trainer"}


async def test_trace_leads_from_a_task_to_its_version(world: World) -> None:
    task_id = await one_step(world)
    told, parsed = [await astraflow(world, "trace", task_id, *option) for option in ((), ("--json",))]
    way = (f"task {task_id} is done", "attempt 1 on n1", "→ trained → batch", "step 1 → version 1")
    assert [words for words in way if words not in told.output] == [], told.output
    assert {item["place"] for item in parsed.json["trajectories"]} == {"trained"}


async def test_trace_of_a_task_that_never_was_ends_with_its_reason(world: World) -> None:
    await world.create_run()
    ended = await astraflow(world, "trace", "never", status=2)
    assert (ended.errors.startswith("NOT_FOUND: "), "'never'" in ended.errors) == (True, True)


async def test_nodes_are_listed_and_sent_home(world: World) -> None:
    await world.create_run()
    assert "no node has joined" in (await astraflow(world, "nodes")).output
    await world.node("n1")
    assert "n1" in (await astraflow(world, "nodes")).output
    drained = await astraflow(world, "nodes", "drain", "n1", "--reason", "upgrade")
    assert "n1 finishes 0 tasks and leaves" in drained.output
    [node] = (await astraflow(world, "nodes", "--json")).json
    assert node["drain_reason"] == "upgrade"
    assert "it was drained for upgrade" in (await astraflow(world, "nodes", "undrain", "n1")).output
    assert "n1 was not drained" in (await astraflow(world, "nodes", "undrain", "n1")).output


async def test_nodes_say_where_they_are_what_they_cost_and_how_busy_they_are(world: World) -> None:
    await one_step(world)
    machine = {"hardware": "8 × H100", "price_per_hour": 36.0}
    await world.node("n1", region="eu", pool="spot", **machine)
    load = EngineLoad(policy_id="solver", running=6, waiting=2, slots=8, kv_usage=0.5, tokens_per_s=500.0)
    other = EngineLoad(policy_id="judge", slots=4, tokens_per_s=math.nan, fault="it reports no load")
    async with working(world) as session:
        told = pb.Credits(tasks=3, serving_versions={"solver": 0}, max_episodes=16, bounded_by="engine_kv")
        told.engine_loads.extend([load, other])
        await session.call.write(pb.WorkRequest(credits=told))
        await world.until(lambda now: now.nodes[0].max_episodes == 16)
        shown = (await astraflow(world, "nodes")).output
        [node] = (await astraflow(world, "nodes", "--json")).json
    words = (
        "eu/spot",
        "8 × H100",
        "36.00",
        "solver 0 (1 behind)",
        "engine_kv",
        "500",
        "20.00",
        "judge: it reports",
    )
    assert [word for word in words if word not in shown] == [], shown
    facts = {
        "region": "eu",
        "hardware": "8 × H100",
        "price_per_hour": 36.0,
        "credits": 3,
        "tokens_per_s": 500.0,
    }
    assert {name: node[name] for name in facts} == facts
    assert (node["version_lags"], node["engine_loads"][0]["kv_usage"]) == ({"solver": 1}, 0.5)
    assert (node["engine_loads"][1]["tokens_per_s"], node["engine_loads"][1]["kv_usage"]) == (0.0, None)


async def test_dead_letters_are_listed_requeued_and_deleted(world: World) -> None:
    _, node = await world.started("bad", "worse", max_attempts=1)
    assert (await astraflow(world, "dead-letters", "list")).output == "no dead letters\n"
    for lease in await node.lease(2):
        await node.fail(lease, "workflow_error", retryable=False)
    listed = await astraflow(world, "dead-letters", "list", "--json")
    letters = {letter["task_id"]: letter["dead_letter_id"] for letter in listed.json["dead_letters"]}
    assert letters.keys() == {"bad", "worse"}
    assert "workflow_error" in (await astraflow(world, "dead-letters", "list")).output
    await astraflow(world, "dead-letters", "requeue", status=2)  # which ones must be said

    async def is_requeued() -> bool:
        requeued = await astraflow(world, "dead-letters", "requeue", letters["bad"])
        assert requeued.output in ("1 requeued, 0 unknown, 0 kept as they are\n", _JUDGED)
        return requeued.output != _JUDGED

    await until(is_requeued)
    assert (await astraflow(world, "dead-letters", "purge", "--all")).output == "1 deleted\n"
    [lease] = await node.lease(1)
    assert lease.task.task_id == "bad"


async def test_runs_are_listed_and_deleted(world: World) -> None:
    assert "the server has no run" in (await astraflow(world, "runs", "list")).output
    await world.create_run()
    [listed] = (await astraflow(world, "runs", "list", "--json")).json
    assert (listed["run_id"], listed["state"]) == ("run", "active")
    assert "recipe_yaml" not in listed
    await world.finish()
    await until(world.is_finished)
    deleted = await astraflow(world, "runs", "delete", "run")
    assert "run run is deleted" in deleted.output
    assert (await astraflow(world, "runs", "list", "--json")).json == []
