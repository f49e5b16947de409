"""The server measures a run and decides; PoolReport, status, why, gauges and KEDA's scaler say the same number."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.keda.v1 import external_scaler_pb2 as pb
from astraflow.recipe.dataflow import AutoscalingSettings
from astraflow_dataflow.servicers.scaler_servicer import ScalerServicer
from astraflow_dataflow.status.autoscaling import Autoscaler, stored
from astraflow_dataflow.status.pool_target import PoolTarget
from astraflow_dataflow.store.plugin_states import PluginStateStore
from support.dataflow_world import World, until

pytestmark = pytest.mark.integration

SCALING = "{pools: {eu: {max_nodes: 2}, us: {min_nodes: 0, max_nodes: 3}}, window_s: 3600}"
"""A window that never ends by itself: the test looks when it wants to."""


def autoscaler(world: World, **changes: float) -> Autoscaler:
    """One of the world's run, whose windows end at once."""
    context = world.dataflow.registry.known(world.run_id)
    assert context is not None
    settings = context.recipe.raas.autoscaling
    assert isinstance(settings, AutoscalingSettings)
    return Autoscaler(
        context,
        world.dataflow.store,
        settings.model_copy(update={"window_s": 0.05, "start_s": 0.0, **changes}),
    )


async def changed(world: World, scaler: Autoscaler) -> PoolTarget:
    """The target once it has changed: the server looks too, and of two looks at once one is lost."""

    async def has_changed() -> bool:
        await scaler.look()
        return (await target(world)).direction != 0

    await until(has_changed)
    return await target(world)


async def target(world: World) -> PoolTarget:
    """What is decided now, after a first look."""
    state = await stored(world.dataflow.store.plugin_states, world.run_id)
    assert state is not None
    return state.target


async def test_a_starving_trainer_grows_the_pools_and_everyone_says_so(world: World) -> None:
    trainer, _ = await world.started(
        raas={"autoscaling": SCALING, "max_concurrent_tasks": 1}, dataset="Unevaluated"
    )
    await world.join("n2", max_concurrent_tasks=1, pool="eu")
    await world.nodes["n2"].report(connected_ms=60_000)
    assert (await trainer.acquire(1, wait_s=0.0)).waiting_for == "ready_groups"
    waiting = asyncio.create_task(trainer.acquire(1, wait_s=30.0))
    grown = await changed(world, autoscaler(world))
    assert (grown.nodes, grown.grown) == (2, 1), grown.reason
    report = await world.ask(admin.PoolReportResponse)
    assert {load.pool: load.target_nodes for load in report.pools if load.pool} == {"eu": 2, "us": 0}
    status, why = await world.status(), await world.why()
    assert status.autoscaling == why.autoscaling == report.autoscaling
    assert "nodes are short" in report.autoscaling.reason
    scaler = ScalerServicer(world.dataflow.registry, world.dataflow.reporting, asyncio.Event())
    assert await scaler._wanted(scaled("eu")) == 2
    assert await scaler._wanted(scaled("us")) == 0
    exported = world.dataflow.metrics.render().decode()
    assert 'astraflow_dataflow_pool_target_nodes{pool="eu",run="run"} 2.0' in exported
    waiting.cancel()
    await world.finish()
    await world.until(lambda now: now.autoscaling.target_nodes == 0)


def scaled(pool: str) -> pb.ScaledObjectRef:
    """What KEDA says of a pool."""
    return pb.ScaledObjectRef(name=pool, scalerMetadata={"pool": pool})


async def test_of_several_servers_one_decides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.started(raas={"autoscaling": SCALING})
    scaler = autoscaler(world)
    states = world.dataflow.store.plugin_states
    (before,) = await states.revisions("run", ["raas.autoscaling"])
    read = asyncio.Barrier(4)

    async def revisions(run_id: str, names: list[str]) -> list[int]:
        found = await PluginStateStore.revisions(states, run_id, names)
        await read.wait()
        return found

    monkeypatch.setattr(states, "revisions", revisions)
    await asyncio.gather(*(scaler.look() for _ in range(4)))
    monkeypatch.undo()
    assert await states.revisions("run", ["raas.autoscaling"]) == [before + 1]


async def test_waits_for_groups_are_counted_and_those_for_versions_are_not(world: World) -> None:
    trainer, node = await world.started(dataset="Counting")
    assert (await trainer.acquire(1, wait_s=0.3)).waiting_for == "ready_groups"
    (policy,) = (await world.dataflow.store.audits.audit("run")).policies
    assert policy.waited_until_ms(policy.wait_until_ms) >= 300
    await node.make_ready(2)
    await trainer.acquire(1)
    (policy,) = (await world.dataflow.store.audits.audit("run")).policies
    assert policy.waited_ms >= 300
    assert policy.waited_until_ms(10**15) == policy.waited_ms


async def test_a_command_resizes_a_pool_and_wrong_use_is_refused_with_what_there_is(
    world: World, tmp_path: Path
) -> None:
    await world.started(raas={"autoscaling": SCALING})
    script, said = tmp_path / "resize.py", tmp_path / "said"
    script.write_text(
        f"import os, pathlib, signal, sys; pathlib.Path({str(said)!r}).write_text(' '.join(sys.argv[1:])); "
        "os.kill(os.getppid(), signal.SIGTERM)"
    )
    command = f"{sys.executable} {script} eu"
    ended = await astraflow(world, "autoscale", "--pool", "eu", "--command", command)
    assert (ended.returncode, said.read_text()) == (0, "eu 1"), ended.errors
    assert ended.output == "eu: 1 nodes (nothing is measured yet)\n"
    other = await astraflow(world, "autoscale", "--pool", "asia", "--command", command)
    assert other.returncode == 2
    assert "no pool 'asia', it names eu, us" in other.errors


@dataclass(frozen=True)
class Ended:
    """What a command ended with."""

    returncode: int
    output: str
    errors: str


async def astraflow(world: World, *arguments: str) -> Ended:
    """Run a command as a process, which gets its own signals, on the world's server."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "astraflow.cli", *arguments, "--join", world.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 100)
    return Ended(process.returncode or 0, output.decode(), errors.decode())


async def test_a_run_without_the_setting_has_no_target(world: World) -> None:
    await world.started()
    report = await world.ask(admin.PoolReportResponse)
    assert not report.HasField("autoscaling")
    assert not any(load.HasField("target_nodes") for load in report.pools)
