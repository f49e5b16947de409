"""The recipe's reward as workflows call it: awaited, under its limits, and every failure of it named.

Invariant: whatever the reward does (raise, hang, end its process, return nonsense), the workflow gets a Score, a
RewardFailed or a MissingCapability. Made by `recipe_code`; a `Service` of the node.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Mapping
from dataclasses import replace

from astraflow.errors import PluginError
from astraflow.plugins import (
    MissingCapability,
    Policy,
    PolicyUnavailable,
    Reward,
    RewardFailed,
    RewardLimits,
    Score,
    TaskSpec,
)
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.settings import RewardLimitSettings
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED, RecipeSource, describe, place_of_code
from astraflow_raas.grading.pool import WorkerPool
from astraflow_raas.grading.process import WorkerOrder
from astraflow_raas.grading.wire import score_of

log = get_logger(__name__)


class RewardScorer:
    """A `Scorer` for a reward that was made; with a `pool`, workers make and call their own."""

    def __init__(
        self, reward: Reward, *, timeout_s: float = RewardLimits.timeout_s, pool: WorkerPool | None = None
    ) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._pool = pool
        self.wants_policies = "policies" in inspect.signature(reward).parameters
        """Whether it may ask the workflow's policies."""
        self._stopped = asyncio.Event()

    async def __call__(
        self, task: TaskSpec, completion: str, *, policies: Mapping[str, Policy] | None = None
    ) -> Score:
        score = await self._scored(task, completion, policies=policies or {})
        if not math.isfinite(score.reward):
            raise RewardFailed(
                f"the reward returned {score.reward}; return a finite number ({place_of_code(self._reward)})"
            )
        return score

    async def _scored(self, task: TaskSpec, completion: str, *, policies: Mapping[str, Policy]) -> Score:
        if self._pool is not None:
            return await self._pool.score(task, completion)
        given = {"policies": policies} if self.wants_policies else {}
        try:
            value = self._reward(task, completion, **given)
            if inspect.isawaitable(value):
                value = await self._in_time(task, value)
            return score_of(value)
        except (MissingCapability, PolicyUnavailable, RewardFailed):
            raise
        except RAISED as error:
            # The whole traceback is in this node's log only.
            log.error("reward.raised", task_id=task.task_id, exc_info=error)
            raise RewardFailed(describe(error)) from error

    async def _in_time(self, task: TaskSpec, value: Awaitable[float | Score]) -> float | Score:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await value
        except TimeoutError as error:
            if not limit.expired():
                raise  # the reward's own
            raise RewardFailed(
                f"task {task.task_id}: the reward did not return within timeout_s {self._timeout_s}; make it faster or "
                "raise raas.reward_limits.timeout_s",
                reason="reward_timeout",
            ) from error

    async def start(self) -> None:
        """Begin to start the workers."""
        if self._pool is not None:
            await self._pool.start()

    async def run(self) -> None:
        """Wait for the end. Raises PluginError when workers cannot make the reward."""
        await (self._pool.run() if self._pool is not None else self._stopped.wait())

    async def stop(self, *, deadline_s: float) -> None:
        """End the workers."""
        self._stopped.set()
        if self._pool is not None:
            await self._pool.stop(deadline_s=deadline_s)


def make_scorer(
    reward: Reward, plugin: PluginSettings, *, source: RecipeSource, given: RewardLimitSettings
) -> RewardScorer:
    """Return the scorer for `reward`, under its own limits and those that the recipe gives instead.

    Raises PluginError for limits that do not fit the reward.
    """
    own = getattr(reward, "limits", RewardLimits())
    if not isinstance(own, RewardLimits):
        raise PluginError(f"plug-in {plugin.use!r}: its `limits` is {own!r}; make it a RewardLimits")
    limits = replace(own, **given.model_dump(exclude_none=True))
    if not limits.processes:
        return RewardScorer(reward, timeout_s=limits.timeout_s)
    call = reward if inspect.isroutine(reward) else type(reward).__call__
    if inspect.iscoroutinefunction(call) or "policies" in inspect.signature(reward).parameters:
        raise PluginError(
            f"plug-in {plugin.use!r} is awaited in the event loop, and cannot run in worker processes; "
            "set raas.reward_limits.processes to 0"
        )
    order = WorkerOrder(plugin=plugin, source=source, limits=limits)
    return RewardScorer(reward, timeout_s=limits.timeout_s, pool=WorkerPool(order))
