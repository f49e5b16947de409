"""An environment that runs in the node's own process, with the bounds that a served one has.

Invariant: whatever the plug-in does short of blocking the event loop ends as `EnvironmentFailed`, which names it and
the turn. Made by `recipe_environments`.
"""

import asyncio
from collections.abc import Awaitable, Callable

from astraflow.chat import check_observation
from astraflow.environments import EnvironmentFailed
from astraflow.plugins import (
    Environment,
    Message,
    MissingCapability,
    Observation,
    TaskSpec,
)
from astraflow_kit import traces
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED, describe
from astraflow_raas.environments.remote import acted

log = get_logger(__name__)


class LocalEnvironment:
    """One environment of one episode."""

    def __init__(self, make: Callable[[], Environment], *, name: str, turn_timeout_s: float) -> None:
        self._make = make
        self._name = name
        self._turn_timeout_s = turn_timeout_s
        self._environment: Environment | None = None
        self._turn = 0

    async def reset(self, task: TaskSpec) -> Observation:
        """Make it and start it."""
        return await self._bounded(lambda: self._begin(task))

    async def step(self, action: Message) -> Observation:
        """Act once."""
        assert self._environment is not None, "reset comes first"
        self._turn += 1
        acting = self._environment.step
        with traces.span(f"execute_tool {self._name}", acted(self._name)):
            return await self._bounded(lambda: acting(action))

    async def close(self) -> None:
        """Free it; what it raises is logged, because the episode is over."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            async with asyncio.timeout(self._turn_timeout_s):
                await environment.close()
        except RAISED as error:  # a plug-in may raise anything
            log.warning("environment.not_closed", environment=self._name, why=describe(error))

    async def _begin(self, task: TaskSpec) -> Observation:
        self._environment = self._make()
        return await self._environment.reset(task)

    async def _bounded(self, call: Callable[[], Awaitable[Observation]]) -> Observation:
        try:
            async with asyncio.timeout(self._turn_timeout_s) as timer:
                return check_observation(await call())
        except MissingCapability:
            raise
        except RAISED as error:  # a plug-in may raise anything
            late = isinstance(error, TimeoutError) and timer.expired()
            why = f"no answer within turn_timeout_s {self._turn_timeout_s:g}" if late else describe(error)
            raise EnvironmentFailed(f"environment {self._name}, turn {self._turn}: {why}") from error
