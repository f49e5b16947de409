"""One worker process of a reward, seen from the node: started, asked, killed with everything it started.

Invariant: a process answers one call at a time, and after a call that did not end in an answer it is never asked again.
Made by `pool`; the other side is `worker`.
"""

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.plugins import MissingCapability, RewardFailed, RewardLimits, Score, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.children import kill_family
from astraflow_kit.family import ending_with_us
from astraflow_kit.parent import python
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.grading.wire import LINE_BYTES, call_line, line
from astraflow_raas.settings import child_environment

_START_TIMEOUT_S = 60.0
_CLOSE_GRACE_S = 5.0


class WorkerRefused(RewardFailed):
    """A worker cannot make the reward."""


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """Which reward a worker makes, under which limits."""

    plugin: PluginSettings
    source: RecipeSource
    limits: RewardLimits

    def encoded(self) -> bytes:
        """The first line that a worker reads."""
        recipe = {"name": self.source.name, "text": self.source.text, "folder": str(self.source.folder or "")}
        return line(
            {
                "plugin": self.plugin.model_dump(mode="json", by_alias=True),
                "recipe": recipe,
                "memory_mb": self.limits.memory_mb,
                "max_calls": self.limits.max_calls,
            }
        )


class WorkerProcess:
    """A started worker."""

    def __init__(self, child: asyncio.subprocess.Process, *, limits: RewardLimits) -> None:
        self._child = child
        self._limits = limits
        self.spent = False
        """True once it must be replaced."""

    async def score(self, task: TaskSpec, completion: str) -> Score:
        """Grade one completion. Raises RewardFailed, MissingCapability; then `spent` says whether it still works."""
        call = call_line(task, completion)
        timeout_s = self._limits.timeout_s
        self.spent = True  # until it has answered
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(call)
        except TimeoutError as error:
            if self._limits.timeout_reward is not None:
                return Score(self._limits.timeout_reward, {"reward_timeout": 1.0})
            raise RewardFailed(
                f"task {task.task_id}: the reward did not return within timeout_s {timeout_s}; its worker was "
                "killed; make it faster or raise raas.reward_limits.timeout_s",
                reason="reward_timeout",
            ) from error
        self.spent = answer["leave"]
        if "missing" in answer:
            raise MissingCapability(answer["missing"])
        if "failed" in answer:
            raise RewardFailed(answer["failed"], reason=answer["reason"])
        return Score(answer["reward"], answer["metrics"])

    async def wait_ready(self, order: WorkerOrder) -> None:
        """Hand it the order and wait until it can grade. Raises WorkerRefused, RewardFailed."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                answer = await self._ask(order.encoded())
        except TimeoutError as error:
            raise RewardFailed(
                f"the reward {order.plugin.use!r} was not made by a worker within {_START_TIMEOUT_S} s",
                reason="reward_timeout",
            ) from error
        if "refused" in answer:
            raise WorkerRefused(answer["refused"])

    async def end(self) -> None:
        """Kill it with everything it started. Idempotent."""
        self.spent = True
        await kill_family(self._child)

    async def _ask(self, request: bytes) -> Any:  # noqa: ANN401 - JSON
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(request)
            await self._child.stdin.drain()
            answer = await self._child.stdout.readline()
        except (ConnectionError, ValueError):
            answer = b""
        if not answer.endswith(b"\n"):
            raise RewardFailed(f"the reward ended its worker process ({await self._how_it_ended()})")
        return json.loads(answer)

    async def _how_it_ended(self) -> str:
        try:
            code = await asyncio.wait_for(self._child.wait(), _CLOSE_GRACE_S)
        except TimeoutError:
            return "it closed its pipe"
        return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


async def start_worker(order: WorkerOrder) -> WorkerProcess:
    """Return a worker that can grade. Raises WorkerRefused, RewardFailed."""
    here = ("", str(Path.cwd()))
    try:
        child = await asyncio.create_subprocess_exec(
            *ending_with_us(*python("astraflow_raas.grading.worker")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment()
            | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path not in here)},
            start_new_session=True,
            limit=LINE_BYTES,
        )
    except OSError as error:
        raise RewardFailed(f"cannot start a worker for the reward: {error}") from error
    worker = WorkerProcess(child, limits=order.limits)
    try:
        await worker.wait_ready(order)
    except BaseException:
        await worker.end()
        raise
    return worker
