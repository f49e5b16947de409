"""Code of a recipe that hangs or takes all memory where it is imported and made: in a node, a trainer, `recipe check`.

The daemon goes on answering meanwhile and says what it waits for; then it ends by name, with a status that nobody
restarts. How the dataflow server bounds such code is in `test_foreign_plugins`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.recipe.file import parse_recipe
from astraflow_kit.lifecycle import ExitCode
from support import trainer_process as trainers
from support.dataflow_world import World, bundle_of, recipe_text, served
from support.node_process import node_of, tiny_policy
from support.trainer_process import TrainerProcess, forking, valkey

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

LIMITS: dict[str, Any] = {"plugin_start_timeout_s": 9.0, "plugin_memory_mb": 256}
HEAD = """
import time

class Odd:
    def __init__(self) -> None:
        {constructor}
    def __call__(self, *given):
        return 0.0
{rest}
"""


def source(*, constructor: str = "pass", rest: str = "") -> str:
    """A recipe.py with a plug-in `Odd`."""
    return HEAD.format(constructor=constructor, rest=rest)


# The code, what a wait says of it meanwhile, and what the end says.
HANGS = {
    "loops at its import": (
        source(rest="while True: pass"),
        "recipe:Odd: its import has not returned for",
        (
            "recipe:Odd: its import did not return within plugin_start_timeout_s",
            "it stood in <module> (recipe.py:9)",
        ),
    ),
    "sleeps in its constructor": (
        source(constructor="time.sleep(1000)"),
        "recipe:Odd: its constructor has not returned for",
        ("recipe:Odd: its constructor did not return", "it stood in __init__ (recipe.py:6)"),
    ),
}
TAKES_MEMORY = source(constructor="self.held = bytearray(4 << 30)")
NAMED = ("recipe:Odd", "MemoryError", "plugin_memory_mb 256", "--plugin-memory-mb")


def rows(*names: str, quick: str) -> list[object]:
    """Rows of a table, of which ci has all and `make test` one."""
    return [name if name == quick else pytest.param(name, marks=pytest.mark.ci) for name in names]


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A server with two runs to come."""
    async with served(redis_url, tmp_path, allow_recipe_code=True) as world:
        yield world


async def create(world: World, text: str, code: str, folder: Path) -> None:
    """Create a run with such a recipe.py."""
    run = run_pb2.Run(
        run_id="run", recipe_yaml=text, store_uri=(folder / "store").as_uri(), code=bundle_of(code)
    )
    await world.ask(run_service_pb2.CreateRunResponse, run=run)
    world.run_id = "run"


async def says(world: World, words: str) -> None:
    """Wait until the server shows `plugin_hung`, in such words."""
    status = await world.until(lambda status: "plugin_hung" in {wait.reason for wait in status.waits})
    (detail,) = [wait.detail for wait in status.waits if wait.reason == "plugin_hung"]
    assert words in detail


def options() -> list[str]:
    """`LIMITS` on a command line."""
    return [f"--{name.replace('_', '-')}={value:g}" for name, value in LIMITS.items()]


@pytest.mark.parametrize("row", rows(*HANGS, quick="loops at its import"))
async def test_a_node_that_makes_them_says_so_in_a_session_and_ends_by_name(
    world: World, tmp_path: Path, row: str
) -> None:
    code, meanwhile, words = HANGS[row]
    await create(world, recipe_text(raas={"reward": '"recipe:Odd"'}), code, tmp_path)
    async with node_of(world.address, tmp_path, "--allow-recipe-code", *options()) as node:
        await says(world, f"node-1, {meanwhile}")
        assert "no_node" not in await world.waits()
        assert await node.ends_with() == ExitCode.USAGE
        (failed,), (hung,) = node.events("daemon.failed"), node.events("plugin.hung")
    assert [word for word in words if word not in str(failed["message"])] == [], failed
    assert "recipe.py" in str(hung["stack"])


async def test_a_node_that_makes_them_slowly_goes_on_under_the_name_that_it_joined_with(
    world: World, tmp_path: Path
) -> None:
    code = source(constructor="time.sleep(6)")
    await create(world, recipe_text(raas={"reward": '"recipe:Odd"'}), code, tmp_path)
    async with node_of(world.address, tmp_path, "--allow-recipe-code", *options()):
        await says(world, "recipe:Odd: its constructor has not returned for")
        status = await world.until(
            lambda status: [one.waiting_for for one in status.nodes if one.connected] == ["version"]
        )
    (node,) = status.nodes
    assert (node.node_id, node.restarts, node.waiting_detail) == ("node-1", 0, "")
    assert "plugin_hung" not in {wait.reason for wait in status.waits}


async def test_a_node_in_which_they_take_memory_ends_by_name(world: World, tmp_path: Path) -> None:
    await create(world, recipe_text(raas={"reward": '"recipe:Odd"'}), TAKES_MEMORY, tmp_path)
    async with node_of(world.address, tmp_path, "--allow-recipe-code", *options()) as node:
        assert await node.ends_with() == ExitCode.USAGE
        (failed,) = node.events("daemon.failed")
    assert [word for word in NAMED if word not in str(failed["message"])] == [], failed


@pytest.mark.ci
async def test_a_node_in_which_they_keep_the_interpreters_lock_ends_with_the_stack_in_its_log(
    world: World, tmp_path: Path
) -> None:
    code = source(rest="9**9**9 if time.time() else 0")
    await create(world, recipe_text(raas={"reward": '"recipe:Odd"'}), code, tmp_path)
    async with node_of(world.address, tmp_path, "--allow-recipe-code", *options()) as node:
        assert await node.ends_with() == -signal.SIGPROF
        assert 'recipe.py", line 9 in <module>' in node.log.read_text()


def trainer_recipe(folder: Path) -> str:
    """A recipe whose loss is `Odd`."""
    sizes = {"group_size": 2, "groups_per_step": 2, "steps": 1, "checkpoint_every_steps": 1}
    text = trainers.RECIPE.format(name="run", model=tiny_policy(folder / "model"), **sizes)
    return parse_recipe(text, overrides=["trainer.algorithm.loss=recipe:Odd"]).yaml_text


@pytest.mark.parametrize("row", rows(*HANGS, quick="sleeps in its constructor"))
async def test_a_trainer_that_makes_them_says_so_and_ends_by_name(
    world: World, tmp_path: Path, row: str
) -> None:
    code, meanwhile, words = HANGS[row]
    await create(world, trainer_recipe(tmp_path), code, tmp_path)
    trainer = TrainerProcess(world.address, tmp_path)
    try:
        trainer.start(allow_recipe_code=True, **LIMITS)
        await says(world, meanwhile)
        await trainer.exits_with(ExitCode.USAGE)
    finally:
        trainer.kill()
    assert [word for word in (*words, "plugin.hung") if word not in trainer.log] == [], trainer.log


async def test_a_trainer_in_which_they_take_memory_ends_by_name(world: World, tmp_path: Path) -> None:
    await create(world, trainer_recipe(tmp_path), TAKES_MEMORY, tmp_path)
    trainer = TrainerProcess(world.address, tmp_path)
    await trainer.lives(status=ExitCode.USAGE, allow_recipe_code=True, **LIMITS)
    assert [word for word in NAMED if word not in trainer.log] == [], trainer.log


CHECKED = {name: (code, words) for name, (code, _, words) in HANGS.items()}


@pytest.mark.parametrize("row", rows(*CHECKED, "takes memory", quick="takes memory"))
async def test_a_recipe_with_them_fails_its_check_by_name(tmp_path: Path, row: str) -> None:
    code, words = CHECKED.get(row, (TAKES_MEMORY, NAMED))
    (tmp_path / "recipe.yaml").write_text(recipe_text(raas={"reward": '"recipe:Odd"'}))
    (tmp_path / "recipe.py").write_text(code)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    limits = {f"ASTRAFLOW_{name.upper()}": f"{value:g}" for name, value in LIMITS.items()}
    checking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "astraflow.cli", "recipe", "check", str(tmp_path / "recipe.yaml")),
        env={**os.environ, "PYTHONPATH": paths, **limits},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = " ".join((await checking.communicate())[0].decode().split())
    assert checking.returncode == ExitCode.USAGE, said
    assert [word for word in words if word not in said] == [], said
