"""Rewards in real worker processes: whatever one call does, it costs that call, and the next one is graded."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import (
    Message,
    MissingCapability,
    RewardFailed,
    RewardLimits,
    Score,
    TaskSpec,
    ToolCall,
)
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.grading.pool import WorkerPool
from astraflow_raas.grading.process import WorkerOrder
from astraflow_raas.grading.wire import task_of
from support.grading_plugins import Misbehaves
from support.scripted_dataflow import eventually

TASK = TaskSpec("t1", (Message("user", "go", (ToolCall("c1", "f", "{}"),)),), {"answer": "7"}, source="here")


@asynccontextmanager
async def pool_of(
    limits: RewardLimits = Misbehaves.limits,
    name: str = "Misbehaves",
    settings: Mapping[str, int] | None = None,
) -> AsyncIterator[WorkerPool]:
    plugin = PluginSettings.model_validate({"use": f"support.grading_plugins:{name}", "with": settings or {}})
    pool = WorkerPool(WorkerOrder(plugin=plugin, source=RecipeSource(), limits=limits))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop(deadline_s=10)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def pid_of(pool: WorkerPool) -> int:
    return int((await pool.score(TASK, "pid")).metrics["pid"])


async def test_a_warm_worker_grades_one_call_after_the_other() -> None:
    async with pool_of() as pool:
        first = await pid_of(pool)
        assert await pool.score(TASK, "four") == Score(4.0)
        assert await pid_of(pool) == first != os.getpid()
    assert not is_alive(first)


@pytest.mark.parametrize(
    ("does", "reason", "words", "worker_stays"),
    [
        ("text", "reward_error", "returned 'a lot' of type str; return a number or a Score", True),
        ("long", "reward_error", "ValueError: xxx", True),
        ("exit 0", "reward_error", "ended its worker process (exit status 0)", False),
        ("die", "reward_error", "ended its worker process (SIGSEGV)", False),
        ("flood", "reward_error", "MemoryError", False),
    ],
)
async def test_a_failure_costs_one_call(does: str, reason: str, words: str, *, worker_stays: bool) -> None:
    async with pool_of() as pool:
        before = await pid_of(pool)
        with pytest.raises(RewardFailed) as failed:
            await pool.score(TASK, does)
        assert (failed.value.reason, words in str(failed.value)) == (reason, True), failed.value
        assert (await pid_of(pool) == before) is worker_stays


async def test_a_hanging_reward_is_killed_with_what_it_started_and_its_neighbour_goes_on(
    tmp_path: Path,
) -> None:
    pids = tmp_path / "pid"
    async with pool_of(replace(Misbehaves.limits, processes=2, timeout_s=1.0)) as pool:
        await asyncio.gather(pid_of(pool), pid_of(pool))
        hanging = asyncio.create_task(pool.score(TASK, f"hang {pids}"))
        await eventually(pids.exists, what="the reward hangs")
        assert await pool.score(TASK, "four") == Score(4.0)
        with pytest.raises(RewardFailed, match="did not return within timeout_s 1") as failed:
            await hanging
        assert failed.value.reason == "reward_timeout"
        assert await pool.score(TASK, "four") == Score(4.0)
        await eventually(lambda: not is_alive(int(pids.read_text())), what="its child is gone")


async def test_a_cancelled_episode_frees_its_worker(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    async with pool_of(replace(Misbehaves.limits, timeout_s=600)) as pool:
        hanging = asyncio.create_task(pool.score(TASK, f"hang {pids}"))
        await eventually(pids.exists, what="the reward hangs")
        hanging.cancel()
        assert await pool.score(TASK, "four") == Score(4.0)


@pytest.mark.parametrize(("max_calls", "does"), [(1, "pid"), (100, "grow")])
async def test_a_worker_is_replaced_when_it_has_done_enough(max_calls: int, does: str) -> None:
    async with pool_of(replace(Misbehaves.limits, max_calls=max_calls)) as pool:
        first = (await pool.score(TASK, does)).metrics["pid"]
        assert await pid_of(pool) != first


async def test_what_a_reward_prints_is_no_answer_and_a_missing_capability_is_none_of_its_faults() -> None:
    async with pool_of() as pool:
        assert await pool.score(TASK, "print") == Score(5.0)
        with pytest.raises(MissingCapability, match="no browser"):
            await pool.score(TASK, "missing")


async def test_a_reward_that_no_worker_can_make_ends_the_node() -> None:
    async with pool_of(name="Unmakeable", settings={"maker_pid": os.getpid()}) as pool:
        with pytest.raises(PluginError, match="no licence for a second process"):
            await pool.run()
        with pytest.raises(RewardFailed, match="no licence"):
            await pool.score(TASK, "four")


def test_a_task_arrives_as_it_was_sent() -> None:
    assert task_of(json.loads(json.dumps(asdict(TASK)))) == TASK
