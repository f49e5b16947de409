"""Answers for when Redis does not answer: what was read of a run last, with what is known of Redis now.

Invariant: an answer comes within three seconds whatever Redis does, and one from memory says so: its wait
`redis_silent`, and the time at which it was read. Called by the admin service.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import RetryableError, UnavailableError
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.status.reporting import Reporting
from astraflow_dataflow.status.watching import watch

_PATIENCE_S = 1.0
"""How long Redis is asked once it is known to be silent: it may be back."""
_LOOK_S = 0.2

T = TypeVar("T")


@dataclass
class LastKnown:
    """Status and waits of runs, from Redis or, while that is silent, from memory."""

    registry: RunRegistry
    reporting: Reporting
    _statuses: dict[str, pb.StatusResponse] = field(default_factory=dict)

    async def run_ids(self) -> list[str]:
        """Return all runs; while Redis is silent, those that were read before."""
        try:
            return await self._answer("", self.reporting.store.runs.ids())
        except _Silent:
            return sorted(self._statuses)

    async def status(self, run_id: str) -> pb.StatusResponse:
        """Return the state of a run. Raises as `Reporting.status`, UnavailableError when nothing is remembered."""
        try:
            status = await self._answer(run_id, self._of_run(run_id, self.reporting.status))
        except _Silent:
            return self._remembered(run_id)
        self._statuses[status.run_id] = status
        return status

    async def why(self, run_id: str, task_id: str) -> pb.WhyResponse:
        """Return what each stage waits for; of a task nothing is remembered. Raises as `Reporting.why`."""
        try:
            return await self._answer(
                run_id, self._of_run(run_id, lambda context: self.reporting.why(context, task_id))
            )
        except _Silent:
            last = self._remembered(run_id)
        if task_id:
            raise UnavailableError(f"Redis does not answer: nothing can be said of task {task_id} now")
        names = (field.name for field in pb.WhyResponse.DESCRIPTOR.fields if field.name != "task")
        return pb.WhyResponse(**{name: getattr(last, name) for name in names})

    async def watch(
        self, run_id: str, *, interval_s: float
    ) -> AsyncIterator[tuple[pb.StatusResponse, list[str]]]:
        """Yield the status and what changed, as `watching.watch`."""
        context = await self.registry.get(run_id)
        async for change in watch(context, lambda: self.status(context.run_id), interval_s=interval_s):
            yield change

    def forget(self, run_id: str) -> None:
        """The run was deleted."""
        self._statuses.pop(run_id, None)

    async def _answer(self, run_id: str, asked: Awaitable[T]) -> T:
        """What is asked of a run's Redis. Raises _Silent once that is known not to answer."""
        reading = asyncio.ensure_future(asked)
        asked_s = 0.0
        try:
            while not (await asyncio.wait((reading,), timeout=_LOOK_S))[0]:
                asked_s += _LOOK_S
                if self.reporting.redis.is_silent(run_id) and asked_s >= _PATIENCE_S:
                    raise _Silent
            return reading.result()
        except RetryableError as error:
            if self.reporting.redis.is_silent(run_id):
                raise _Silent from error
            raise
        finally:
            reading.cancel()

    async def _of_run(self, run_id: str, ask: Callable[[RunContext], Awaitable[T]]) -> T:
        return await ask(await self.registry.get(run_id))

    def _remembered(self, run_id: str) -> pb.StatusResponse:
        """The last status of the run, under what is known of Redis now. Raises UnavailableError when there is none."""
        problem = self.reporting.redis_waits(run_id)
        found = self._statuses.get(run_id)
        if found is None and not run_id and len(self._statuses) == 1:
            (found,) = self._statuses.values()
        if found is None:
            message = problem[0].detail if problem else "Redis does not answer"
            raise UnavailableError(f"{message}; this server has not read that run before", retry_after_s=1.0)
        status = pb.StatusResponse()
        status.CopyFrom(found)
        del status.waits[:]
        status.waits.extend([*problem, *(wait for wait in found.waits if wait.stage != "data")])
        return status


class _Silent(Exception):
    """Redis does not answer."""
