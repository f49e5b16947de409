"""A node as a process, with its real engine, against a scripted server and a real store."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import task_service_pb2
from astraflow.raas.v1 import node_service_pb2 as nodes
from astraflow.raas.v1.node_service_pb2_grpc import NodeServiceStub
from astraflow.rollout.v1.trajectory_pb2 import Episode, Trajectory
from astraflow_kit import failpoints
from astraflow_raas.engine.base import GenerateCall
from astraflow_raas.engine.http import HttpEngine
from support.node_process import START_S, NodeProcess, WeightPublisher, node_of
from support.raas_parts import generate_call
from support.scripted_dataflow import POLICY, RECIPE, RUN_ID, ScriptedDataflow, a_run, eventually, lease
from support.scripted_dataflow import RunningServer as Server
from support.scripted_dataflow import running as serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture
def trainer(checkpoint: Path, tmp_path: Path) -> WeightPublisher:
    return WeightPublisher.open(tmp_path / "store", run_id=RUN_ID, policy_id=POLICY, checkpoint=checkpoint)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(ScriptedDataflow(run=a_run(store_uri=(tmp_path / "store").as_uri()))) as server:
        yield server


async def ready(script: ScriptedDataflow, version: int) -> None:
    def serves() -> bool:
        return bool(script.credits) and script.credits[-1].serving_versions.get(POLICY) == version

    await eventually(serves, what=f"version {version} serves", patience_s=START_S)


async def pushed(script: ScriptedDataflow, task: str, number: int) -> Sequence[Episode]:
    """Hand out a task; its four episodes, once so many were pushed in all."""
    script.send(lease=lease(task))
    await eventually(lambda: len(script.pushes) == number, what=f"{number} episodes", patience_s=START_S)
    return script.pushes[-4:]


Working = Callable[..., AbstractAsyncContextManager[NodeProcess]]


@pytest.fixture
def working(server: Server, trainer: WeightPublisher, shared_engine: str, tmp_path: Path) -> Working:
    """Starts a node that serves version 0 by the shared engine."""

    @asynccontextmanager
    async def start(*options: str) -> AsyncIterator[NodeProcess]:
        server.script.versions = [trainer.publish()]
        async with node_of(server.address, tmp_path, "--engine", shared_engine, *options) as node:
            await ready(server.script, 0)
            yield node

    return start


@pytest.fixture
async def holding(server: Server, working: Working) -> AsyncIterator[NodeProcess]:
    """A node that holds a lease whose four episodes are pushed and not acknowledged."""
    server.script.ack = asyncio.Event()
    async with working() as node:
        await pushed(server.script, "held", 4)
        yield node


def versions_of(episodes: Sequence[Episode]) -> set[int]:
    return {item.header.min_version for episode in episodes for item in episode.trajectories}


async def test_a_nodes_life_from_joining_to_leaving(
    server: Server, trainer: WeightPublisher, tmp_path: Path
) -> None:
    script = server.script
    async with node_of(server.address, tmp_path) as node:
        await eventually(lambda: script.credits, what="the node has joined", patience_s=START_S)
        assert (script.credits[-1].tasks, script.credits[-1].waiting_for) == (0, "version")
        script.send(version=trainer.publish())
        await ready(script, 0)
        assert script.credits[-1].tasks == 2

        for episode in await pushed(script, "first", 4):
            (item,) = episode.trajectories
            columns = decode_columns(Trajectory.FromString(item.body))
            assert item.header.num_trainable_tokens == columns.loss_mask.sum() <= 8
            assert (columns.logprobs[columns.loss_mask] < 0).all()
            assert {version for _, _, version in columns.version_spans} == {0}

        script.send(version=trainer.publish())
        await ready(script, 1)
        assert versions_of(await pushed(script, "second", 8)) == {1}

        assert await node.versions() == {1: (True, True, True)}
        unknown = nodes.ListVersionsRequest(policy_id="nobody")
        foreign = await node.refuses(
            lambda channel: NodeServiceStub(channel).ListVersions(unknown, timeout=10)
        )
        assert (foreign.reason, POLICY in foreign.message) == ("NOT_FOUND", True)

        for engine in node.engines:
            engine.kill()
        assert versions_of(await pushed(script, "third", 12)) == {1}
        while (status := await node.status()).episodes_unacked:
            pass  # the answers to the last pushes are on their way
        assert (status.engine_restarts, status.draining) == (1, False)
        (served,) = status.policies
        assert (served.version, served.snapshots_fetched, served.deltas_fetched) == (1, 1, 1)
        trajectories = [item.header for episode in script.pushes for item in episode.trajectories]
        assert status.tokens == sum(header.num_trainable_tokens for header in trajectories)
        node.process.send_signal(signal.SIGTERM)
        assert await node.ends_with() == 0
        assert not node.engines
    assert script.failures == []


async def test_on_sigterm_a_node_finishes_and_pushes_what_it_holds(
    server: Server, holding: NodeProcess
) -> None:
    script = server.script
    holding.send(signal.SIGTERM)
    await eventually(lambda: script.credits[-1].waiting_for == "drain", what="the drain")
    assert holding.process.returncode is None
    assert script.ack is not None
    script.ack.set()
    assert await holding.ends_with() == 0
    assert script.failures == []


async def test_an_operators_drain_is_obeyed_also_by_a_node_that_stays(
    server: Server, working: Working
) -> None:
    async with working("--stay") as node:
        server.script.send(drain=task_service_pb2.Drain(reason="run_finished"))
        await eventually(lambda: node.events("node.stays"), what="the end of the run is noted")
        server.script.send(drain=task_service_pb2.Drain(reason="operator"))
        assert await node.ends_with() == 0


async def test_a_node_without_its_server_keeps_what_it_has_says_so_and_goes_on(
    server: Server, holding: NodeProcess
) -> None:
    script = server.script
    await server.stop()
    waits = {"waiting_for": "server", "leases": 1, "episodes_kept": 4}.items()
    await eventually(lambda: waits <= (holding.events("node.waits") or [{}])[-1].items(), what="it is logged")
    assert (await holding.status()).waiting_for == "server"
    await server.restart()
    await eventually(lambda: len(script.hellos) == 2, what="a new session")
    assert list(script.hellos[1].held.lease_ids) == ["held#1"]
    assert script.ack is not None
    script.ack.set()
    await eventually(lambda: len(script.pushes) == 8, what="the four again")
    await eventually(lambda: script.credits[-1].tasks == 2, what="the lease is finished")
    first, again = (
        {episode.episode_id for episode in half} for half in (script.pushes[:4], script.pushes[4:])
    )
    assert first == again


async def test_a_node_whose_server_does_not_come_back_ends_and_leaves_what_it_has_on_disk(
    server: Server, working: Working
) -> None:
    server.script.ack = asyncio.Event()
    async with working("--server-gone-timeout-s", "2", "--drain-timeout-s", "4") as node:
        await pushed(server.script, "held", 4)
        await server.stop()
        assert await node.ends_with() == 75
    (failed,) = node.events("daemon.failed")
    assert "4 episodes are kept on disk" in str(failed)
    assert "--server-gone-timeout-s" in str(failed)


async def test_a_second_signal_ends_the_node_at_once(server: Server, holding: NodeProcess) -> None:
    holding.send(signal.SIGTERM)
    await eventually(lambda: server.script.credits[-1].waiting_for == "drain", what="the drain")
    holding.send(signal.SIGTERM)
    assert await holding.ends_with() == 130


async def test_a_swap_in_the_middle_of_generations_is_reported_token_by_token(
    checkpoint: Path, shared_engine: str
) -> None:
    engine = HttpEngine(shared_engine)
    await engine.swap(model_dir=checkpoint, version=100)
    for version in range(101, 121):
        sampling = asyncio.create_task(engine.generate(calls(48, f"during-{version}")))
        while not sampling.done() and not await num_running(shared_engine):  # noqa: ASYNC110 - another process signals nobody
            await asyncio.sleep(0)
        await engine.swap(model_dir=checkpoint, version=version)
        assert await engine.served_version() == version
        # Every answer was checked on the way in: spans ascend, touch and cover all tokens.
        seen = [[span.version for span in generation.spans] for generation in await sampling]
        assert {one for versions in seen for one in versions} <= {version - 1, version}
        if [version - 1, version] in seen:
            break
    else:
        raise AssertionError("no swap of twenty met a running generation")
    (fresh,) = await engine.generate(calls(1, "fresh"))
    assert {span.version for span in fresh.spans} == {version}
    await engine.close()


async def num_running(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        return int((await client.get(f"{url}/server_info")).json()["internal_states"][0]["num_running"])


def calls(number: int, name: str) -> list[GenerateCall]:
    """Calls that fill the model's context, each with a seed of its own."""
    return [
        generate_call(f"{name}-{index}", prompt_ids=(5, 6, 7), max_new_tokens=110, seed=index)
        for index in range(number)
    ]


async def test_a_killed_node_takes_its_engine_along_and_comes_back_with_its_mirror(
    server: Server, trainer: WeightPublisher, tmp_path: Path
) -> None:
    script = server.script
    script.versions = [trainer.publish()]
    hits = tmp_path / "hits.jsonl"
    variables = {"ASTRAFLOW_FAILPOINTS": "raas.pushed=kill@3", "ASTRAFLOW_FAILPOINTS_LOG": str(hits)}
    async with node_of(server.address, tmp_path, **variables) as node:
        await ready(script, 0)
        engines = node.engines
        assert engines
        script.send(lease=lease("doomed"))
        assert await node.ends_with() == -signal.SIGKILL
        assert psutil.wait_procs(engines, timeout=START_S)[1] == [], "all engines are gone"
    assert [hit.name for hit in failpoints.read_hits(hits) if hit.acted] == ["raas.pushed"]
    async with node_of(server.address, tmp_path) as node:
        await eventually(lambda: len(script.hellos) == 2, what="the node is back", patience_s=START_S)
        await ready(script, 0)
        assert (await node.status()).policies[0].snapshots_fetched == 0
        assert script.hellos[1].incarnation > script.hellos[0].incarnation
        script.send(drain=task_service_pb2.Drain(reason="run_finished"))
        assert await node.ends_with() == 0


async def test_wrong_circumstances_end_with_the_exit_code_that_says_so(
    server: Server, tmp_path: Path
) -> None:
    own = RECIPE.replace("astraflow_raas.rewards.boxed_match:BoxedMatch", "recipe:Own")
    server.script.run.recipe_yaml = own
    async with node_of(server.address, tmp_path) as node:
        assert await node.ends_with() == 2
        assert "--allow-recipe-code" in node.log.read_text()
    (tmp_path / "away").mkdir()
    async with node_of("127.0.0.1:9", tmp_path / "away", "--join-timeout-s", "0.5") as node:
        assert await node.ends_with() == 75


async def test_check_says_what_the_node_would_run(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "astraflow_raas", "--join", server.address, "--check"]
    command += ["--work-dir", str(tmp_path)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=START_S, check=True)
    assert f"run: {RUN_ID}" in done.stdout.decode()
    assert server.script.joins == []
