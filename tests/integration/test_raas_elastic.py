"""Nodes come and go while a run goes on: joins, drains, kills, freezes. Real node processes, a real dataflow server
over a real Valkey, real weights; one engine that somebody else runs serves the nodes of a test."""

import asyncio
import itertools
import operator
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest

from astraflow.dataflow.v1 import admin_service_pb2, batch_pb2, batch_service_pb2
from astraflow.raas.v1 import node_service_pb2, node_service_pb2_grpc
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_list, as_text
from astraflow_kit import failpoints
from astraflow_raas.push.spool_files import SpoolFiles
from astraflow_raas.timeline import Stage
from support.dataflow_world import Trainer, World, until_equal
from support.node_process import NodeProcess, WeightPublisher, announce, node_of, started
from support.scripted_dataflow import eventually

# The other Redis has the dataflow server's own tests: nodes never see it.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

happens = partial(eventually, patience_s=60.0)
GATED = {"workflow": "support.node_plugins:Gated", "max_concurrent_tasks": 2, "episode_timeout_s": 600}
RUN = "run"


@dataclass
class Elastic:
    """A run with real weights, and nodes that use one engine."""

    world: World
    trainer: Trainer
    weights: WeightPublisher
    engine: str
    folder: Path

    def __post_init__(self) -> None:
        self.gate, self.hits = self.folder / "gate", self.folder / "hits.jsonl"

    def armed(self, spec: str) -> dict[str, str]:
        """Variables that arm failpoints in a node and its engine."""
        return {"ASTRAFLOW_FAILPOINTS": spec, "ASTRAFLOW_FAILPOINTS_LOG": str(self.hits)}

    def acted(self) -> list[str]:
        """The failpoints that acted."""
        return [hit.name for hit in failpoints.read_hits(self.hits) if hit.acted]

    def node(self, name: str, *options: str, **variables: str) -> AbstractAsyncContextManager[NodeProcess]:
        (self.folder / name).mkdir(exist_ok=True)
        told, variables = ("--engine", self.engine, *options), {"TEST_GATE": str(self.gate)} | variables
        return node_of(self.world.address, self.folder / name, *told, node_id=name, **variables)

    async def train(self, step: int) -> batch_pb2.Batch:
        """One whole step with real weights at its end."""
        for _ in range(3):  # one call waits for half a minute at most
            batch = (await self.trainer.acquire(step, base_version=step - 1, wait_s=30)).batch
            if batch.items:
                break
        assert batch.items, "a batch came in time"
        await self.trainer.ack(batch, batch_service_pb2.BATCH_STAGE_INTENT)
        await self.trainer.ack(batch, batch_service_pb2.BATCH_STAGE_TRAINED)
        await announce(self.trainer, self.weights, step=step)
        return batch

    async def held_by(self, name: str, number: int) -> None:
        await self.world.until(
            lambda now: (name, number) in {(node.node_id, node.leases) for node in now.nodes}
        )

    async def stored(self, command: str, *key: str, fields: Sequence[str] = ()) -> object:
        """The answer of the server's Redis."""
        return await self.world.dataflow.store.connection.raw(command, Keys(RUN).of(*key), *fields)

    async def renewed_by(self, name: str, number: int, *, ttl_s: float) -> dict[str, int]:
        """Wait until a node renewed its leases, so that it surely has them; when, by the server's clock."""
        given = [as_text(task) for task in as_list(await self.stored("SMEMBERS", "node_leases", name))]
        assert len(given) == number
        first = latest = [await self.leased_at_ms(task, ttl_s=ttl_s) for task in given]
        while not all(map(operator.lt, first, latest)):
            latest = [await self.leased_at_ms(task, ttl_s=ttl_s) for task in given]
        return dict(zip(given, latest, strict=True))

    async def task(self, task_id: str, *fields: str) -> list[str]:
        """Fields of a stored task, the server's own ledger."""
        return [as_text(f) for f in as_list(await self.stored("HMGET", "task", task_id, fields=fields))]

    async def becomes(self, task_id: str, **fields: str) -> None:
        """Wait until a stored task has these fields."""
        await until_equal(partial(self.task, task_id, *fields), list(fields.values()))

    async def attempts(self) -> dict[str, int]:
        """Attempt of every task that was leased and is still known."""
        known = [as_text(name) for name in as_list(await self.stored("SMEMBERS", "known"))]
        found = {name: int((await self.task(name, "attempt"))[0] or 0) for name in known}
        return {name: attempt for name, attempt in found.items() if attempt}

    async def leased_at_ms(self, task_id: str, *, ttl_s: float) -> int:
        """When a lease was given, by the server's clock."""
        ends = as_text(await self.stored("ZSCORE", "leases", fields=[task_id]))
        return int(float(ends)) - int(ttl_s * 1000)


@pytest.fixture
async def run(
    request: pytest.FixtureRequest, world: World, checkpoint: Path, shared_engine: str, tmp_path: Path
) -> Elastic:
    """A run with version 0; a test may parametrize it with settings of its own."""
    store = tmp_path / "store"
    settings = {"dataset": "Unevaluated", "raas": GATED} | getattr(request, "param", {})
    await world.create_run(store_uri=store.as_uri(), **settings)
    trainer = await world.trainer(publish_first=False)
    weights = WeightPublisher.open(store, run_id=RUN, policy_id="solver", checkpoint=checkpoint)
    await announce(trainer, weights, step=0)
    return Elastic(world, trainer, weights, shared_engine, tmp_path)


def of_run(**settings: object) -> pytest.MarkDecorator:
    """The settings of a test's run."""
    return pytest.mark.parametrize("run", [settings], indirect=True, ids=["run"])


async def test_a_second_node_joins_mid_run_with_one_command_and_is_trained_on(
    run: Elastic, tmp_path: Path
) -> None:
    run.gate.touch()
    command = [sys.executable, "-m", "astraflow.cli", "raas", "--join", run.world.address]
    (tmp_path / "late").mkdir()
    # It is told no folder: what it keeps stays with the test all the same.
    places = {"HOME": str(tmp_path / "home"), "ASTRAFLOW_MIRROR_DIR": str(tmp_path / "mirrors")}
    async with run.node("early"):
        await run.train(1)
        async with started(command, tmp_path / "late", **places) as late:
            trained: set[str] = set()
            for step in range(2, 200):
                trained |= trajectories_of(await run.train(step))
                if trained & pushed_by(late):
                    break
            assert trained & pushed_by(late), "the late node's work is trained on"
            (report,) = late.events("node.first_lease")
            late.send(signal.SIGTERM)
            assert await late.ends_with() == 0
    stages = [stage for stage in Stage if stage is not Stage.VERSION]
    reached = [float(str(report[f"{stage.value}_s"])) for stage in stages]
    assert reached == sorted(reached)
    assert 0 < float(str(report["besides_engine_s"])) < float(str(report["first_lease_s"]))
    await run.world.has_account()


def trajectories_of(batch: batch_pb2.Batch) -> set[str]:
    return {item.trajectory_id for item in batch.items}


def pushed_by(node: NodeProcess, *, outcome: str = "") -> set[str]:
    """Trajectories that a node pushed, by its own log: all, or those with one outcome."""
    lines = [line for line in node.events("episode.pushed") if outcome in ("", line["outcome"])]
    return {str(name) for line in lines for name in cast("list[object]", line["trajectory_ids"])}


Drain = Callable[[Elastic, NodeProcess], Awaitable[None]]


async def by_signal(run: Elastic, node: NodeProcess) -> None:
    node.send(signal.SIGTERM)


async def by_the_server(run: Elastic, node: NodeProcess) -> None:
    answer = await run.world.ask(admin_service_pb2.DrainNodeResponse, node_id="leaving")
    assert (answer.leases, answer.connected) == (2, True)


async def by_rpc(run: Elastic, node: NodeProcess) -> None:
    async with node.channel() as channel:
        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        assert (await stub.Drain(node_service_pb2.DrainRequest(), timeout=10)).leases == 2


@pytest.mark.parametrize("drain", [by_signal, by_rpc, by_the_server])
async def test_a_drain_within_its_time_costs_no_task_a_second_lease(run: Elastic, drain: Drain) -> None:
    async with run.node("leaving") as node:
        await run.held_by("leaving", 2)
        await drain(run, node)
        await run.world.until(lambda now: now.nodes[0].waiting_for == "drain")
        assert node.process.returncode is None
        run.gate.touch()
        assert await node.ends_with() == 0
    status = await run.world.until(lambda now: not now.nodes[0].connected)
    assert (status.nodes[0].leases, status.policies[0].ready_groups) == (0, 2)
    assert await run.attempts() == {"train-0": 1, "train-1": 1}


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_fifty_drains_at_random_instants_cost_no_task_a_second_lease(run: Elastic) -> None:
    run.gate.touch()
    training, generator = asyncio.create_task(endless_steps(run)), random.Random(1)
    for number in range(50):
        async with run.node("leaving") as node:
            before = len(node.events("episode.pushed"))
            await happens(lambda: len(node.events("episode.pushed")) > before, what="it works")  # noqa: B023
            await asyncio.sleep(generator.uniform(0, 1))
            if number % 2:
                await run.world.ask(admin_service_pb2.DrainNodeResponse, node_id="leaving")
            else:
                node.send(signal.SIGTERM)
            assert await node.ends_with() == 0
        assert set((await run.attempts()).values()) <= {1}
        assert node.events("lease.given_back") == []
        # What the server may still lose, the next process pushes again.
        assert outcomes_of(node) <= {"accepted", "duplicate"}
    training.cancel()
    await run.world.has_account()


async def endless_steps(run: Elastic) -> None:
    """Trains whatever comes."""
    for step in itertools.count(1):
        await run.train(step)


@of_run(lease_ttl_s=2.0)
async def test_a_killed_nodes_work_is_leased_again_once_its_leases_have_ended(run: Elastic) -> None:
    ttl_s = 2.0
    async with run.node("doomed") as node:
        await run.held_by("doomed", 2)
        renewed_ms = await run.renewed_by("doomed", 2, ttl_s=ttl_s)
        node.send(signal.SIGKILL)
        assert await node.ends_with() == -signal.SIGKILL
    other, found = await run.world.node("other"), set[str]()
    while len(found) < 2:
        found |= {lease.task.task_id for lease in await other.lease(2, wait_s=5.0) if lease.attempt == 2}
    for task_id in found:
        assert await run.leased_at_ms(task_id, ttl_s=ttl_s) >= renewed_ms[task_id] + 1000 * ttl_s
        assert await run.task(task_id, "attempt", "tries") == ["2", "2"]


@of_run(lease_ttl_s=1.0, max_attempts=10)
async def test_a_node_frozen_for_three_leases_overwrites_nothing_and_goes_on(run: Elastic) -> None:
    ttl_s = 1.0
    async with run.node("frozen", **run.armed("raas.spooled=stop@1")) as node:
        run.gate.touch()
        process = psutil.Process(node.process.pid)
        await happens(lambda: process.status() == psutil.STATUS_STOPPED, what="the node is frozen")
        assert run.acted() == ["raas.spooled"]
        frozen_s = time.monotonic()
        other, taken = await run.world.node("other"), dict[str, task_pb2.Lease]()
        while len(taken) < 2:
            leases = await other.lease(2, wait_s=5.0)
            taken |= {lease.task.task_id: lease for lease in leases if lease.attempt > 1}
        theirs = set()
        for lease in taken.values():
            assert await other.complete(lease) == ["ACCEPTED", "ACCEPTED"]
            theirs |= {f"{other.episode(lease, member).episode_id}.solver" for member in lease.members}
        await asyncio.sleep(frozen_s + 3 * ttl_s - time.monotonic())
        node.send(signal.SIGCONT)
        await happens(lambda: "fenced" in outcomes_of(node), what="its late push is answered")
        assert trajectories_of(await run.train(1)) == theirs
        assert trajectories_of(await run.train(2)) <= pushed_by(node, outcome="accepted")
        given_up = {line["lease_id"].rpartition(".")[0] for line in node.events("lease.cancelled")}
        assert {f"{task_id}#1" for task_id in taken} <= given_up
        assert node.process.returncode is None
    await run.world.has_account()


def outcomes_of(node: NodeProcess) -> set[str]:
    """What the server answered to its pushes."""
    return {str(line["outcome"]) for line in node.events("episode.pushed")}


async def test_what_a_killed_node_finished_is_pushed_by_its_next_process_and_not_sampled_again(
    run: Elastic,
) -> None:
    run.gate.touch()
    async with run.node("node", **run.armed("raas.spooled=kill@4")) as node:
        assert await node.ends_with() == -signal.SIGKILL
        spooled = SpoolFiles(run.folder / "node" / "work" / "node" / "spool" / RUN).recover()
        kept = {item.header.trajectory_id for _, episode in spooled for item in episode.trajectories}
    assert kept, "the episode of the failpoint is on disk"
    async with run.node("node") as node:
        assert kept <= trajectories_of(await run.train(1))
        assert node.process.returncode is None
    await run.world.has_account()


@of_run(raas={"workflow": "support.node_plugins:NeedsSandbox", "max_concurrent_tasks": 2})
async def test_a_task_that_a_node_cannot_run_goes_to_one_that_can_and_loses_no_attempt(run: Elastic) -> None:
    async with run.node("bare") as bare:
        await run.becomes("train-0", state="retry", attempt="1", tries="0")
        (reason,) = {str(line["reason"]) for line in bare.events("lease.given_back")}
        assert reason == "missing_capability"
        async with run.node("able", TEST_SANDBOX="yes") as able:
            trained = trajectories_of(await run.train(1))
            await eventually(lambda: trained <= pushed_by(able), what="the log of the able node")
        refused = [line["lease_id"] for line in bare.events("lease.given_back")]
        assert len(refused) == len(set(refused)), "no task came back to the node that refused it"
    assert (await run.world.status()).dead_letters == 0


async def test_an_engine_that_a_killed_node_left_paused_serves_the_next_one(run: Elastic) -> None:
    run.gate.touch()
    async with httpx.AsyncClient(base_url=run.engine) as engine:
        (await engine.post("/pause_generation", json={"mode": "in_place"})).raise_for_status()
    async with run.node("next") as node:
        trained = trajectories_of(await run.train(1))
        await eventually(lambda: trained <= pushed_by(node), what="the node's log of its pushes")


IN_CI = ("raas.joined@1", "raas.spooled@2", "raas.push@3", "raas.draining@1")
IN_A_LOOP = ("raas.leased@2", "raas.generating@3", "raas.pushed@2", "raas.activate@1", "raas.activated@1")
"""Windows in which tests/chaos/test_kills.py kills a node in ci."""
WINDOWS = [
    *(pytest.param(window, marks=pytest.mark.ci) for window in IN_CI),
    *(pytest.param(window, marks=pytest.mark.soak) for window in IN_A_LOOP),
]


@pytest.mark.parametrize("window", WINDOWS)
async def test_a_node_killed_in_a_window_comes_back_and_nothing_is_lost_or_trained_twice(
    run: Elastic, window: str
) -> None:
    run.gate.touch()
    arming, moment = run.armed(window.replace("@", "=kill@")), window.partition("@")[0]
    training = asyncio.create_task(three_steps(run))
    try:
        async with run.node("node", **arming) as node:
            if moment == "raas.draining":
                await happens(lambda: pushed_by(node), what="it works")
                node.send(signal.SIGTERM)
            assert await node.ends_with() == -signal.SIGKILL
        async with run.node("node", **arming) as node:
            trained = await training
            assert set(run.acted()) == {moment}
            # All may have been done before it died: a drain is asked of the node that came back, not of its start.
            await run.world.until(lambda now: now.nodes[0].restarts == 1 and now.nodes[0].connected)
            node.send(signal.SIGTERM)
            assert await node.ends_with() == 0
    finally:
        training.cancel()
    assert len(trained) == len(set(trained)) == 3 * 2 * 2
    await run.world.has_account(trained=len(trained))


@pytest.mark.ci
@pytest.mark.parametrize(("moment", "nth"), [("engine.decode_step", 20), ("engine.before_swap", 1)])
async def test_an_engine_killed_in_a_window_costs_no_episode_and_no_version(
    run: Elastic, moment: str, nth: int
) -> None:
    run.gate.touch()
    arming = run.armed(f"{moment}=kill@{nth}")
    async with run.node("node", "--engine", "cpu", **arming) as node:
        trained = await three_steps(run)
        await run.world.serves(3)
        status = await node.status()
        assert set(run.acted()) == {moment}
        assert (status.engine_restarts, status.policies[0].verification_failures) == (1, 0)
        await eventually(lambda: set(trained) <= pushed_by(node, outcome="accepted"), what="its log")
        assert outcomes_of(node) == {"accepted"}
    assert len(trained) == len(set(trained)) == 3 * 2 * 2
    await run.world.has_account()


async def test_two_engines_share_a_policy_and_one_that_is_killed_costs_neither_step_nor_version(
    run: Elastic,
) -> None:
    run.gate.touch()
    async with run.node("node", "--engine", "cpu", "--serve", "solver=2") as node:
        trained = trajectories_of(await run.train(1))
        assert await versions_of(node, [1, 1]) == [0, 0]
        first, _second = node.events("engine.started")
        (victim,) = psutil.Process(int(str(first["pid"]))).children()
        victim.kill()
        for step in (2, 3):
            trained |= trajectories_of(await run.train(step))
        assert sorted(await versions_of(node, [3, 3])) == [0, 1]
        await eventually(lambda: trained <= pushed_by(node, outcome="accepted"), what="its log")
        assert outcomes_of(node) == {"accepted"}
    assert len(trained) == 3 * 2 * 2
    await run.world.has_account()


async def versions_of(node: NodeProcess, versions: list[int]) -> list[int]:
    """Wait until the engines of the policy serve these; returns how often each was lost."""
    while True:
        engines = (await node.status()).policies[0].engines
        if [engine.version for engine in engines] == versions:
            return [engine.restarts for engine in engines]
        await asyncio.sleep(0.05)


async def three_steps(run: Elastic) -> list[str]:
    """The trajectories of three steps."""
    return [item.trajectory_id for step in (1, 2, 3) for item in (await run.train(step)).items]
