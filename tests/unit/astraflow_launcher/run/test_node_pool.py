"""Nodes are added by name and the newest drain first; none that drains is killed, or started again, for it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from astraflow_launcher.run.node_pool import NodePool, first_nodes
from astraflow_launcher.run.processes import Child, ChildSpec, Supervisor
from support.recipes import tiny_recipe
from support.scripted_dataflow import eventually

DRAINS = """
import pathlib, signal, sys, time
asked, may_end, name = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
def drain(*_):
    asked.joinpath(name).touch()
    while not may_end.exists():
        time.sleep(0.01)
    sys.exit(124)
signal.signal(signal.SIGTERM, drain)
asked.joinpath(name + ".ready").touch()
time.sleep(60)
"""
"""A node that drains for as long as the test wants, and ends with the status of a drain that took too long."""


@asynccontextmanager
async def pool_in(folder: Path) -> AsyncIterator[tuple[NodePool, dict[str, Child], Callable[[], list[str]]]]:
    """A pool whose nodes drain until the file `may_end` is there; its children, and the names of those that run."""
    async with Supervisor(stop_grace_s=5) as supervisor:

        async def start(name: str) -> Child:
            argv = (sys.executable, "-c", DRAINS, str(folder), str(folder / "may_end"), name)
            (folder / f"{name}.ready").unlink(missing_ok=True)
            child = await supervisor.start(ChildSpec(name=name, argv=argv, log_path=folder / f"{name}.log"))
            await eventually((folder / f"{name}.ready").exists, what=f"{name} runs")
            return child

        children = supervisor.children
        yield (
            NodePool("eu", start),
            children,
            lambda: sorted(name for name, child in children.items() if child.running),
        )
        (folder / "may_end").touch()


async def test_the_newest_node_drains_and_its_name_is_free_when_it_has_ended(tmp_path: Path) -> None:
    async with pool_in(tmp_path) as (pool, children, running):
        await pool.resize(2)
        await pool.resize(2)
        assert running() == ["node-eu-1", "node-eu-2"]
        await pool.resize(1)
        second = children["node-eu-2"]
        await eventually((tmp_path / "node-eu-2").exists, what="it drains")
        await pool.resize(2)
        assert running() == ["node-eu-1", "node-eu-2", "node-eu-3"], "a node that drains is left alone"
        (tmp_path / "may_end").touch()
        await second.finished.wait()
        assert (second.exit_code, second.restarts) == (124, 0), "and is not started again"
        await pool.resize(3)
        assert running() == ["node-eu-1", "node-eu-2", "node-eu-3"]


async def test_a_node_that_has_not_started_can_be_let_go(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:

        async def start(name: str) -> Child:
            argv = (sys.executable, "-c", "import time; time.sleep(60)")
            return await supervisor.start(ChildSpec(name=name, argv=argv, log_path=tmp_path / "log"))

        pool = NodePool("", start)
        await pool.resize(1)
        await pool.resize(0)
        child = supervisor.children["node-1"]
        await child.finished.wait()
        assert child.restarts == 0


def test_a_run_says_how_many_nodes_it_begins_with() -> None:
    scaling = (
        "raas.autoscaling={pools: {eu: {max_nodes: 2}, us: {min_nodes: 0, max_nodes: 4}}, start_nodes: 3}"
    )
    assert first_nodes(tiny_recipe().recipe, num_nodes=2) == {"": 2}
    assert first_nodes(tiny_recipe(scaling).recipe, num_nodes=1) == {"eu": 2, "us": 1}
    assert first_nodes(tiny_recipe(scaling, "run.steps=0").recipe, num_nodes=4) == {"": 4}
