"""The worker processes of a reward: a fixed number, warm, each replaced when it overran, died or has done enough.

Invariant: there are never more workers than `processes`; a call that fails, or whose episode is cancelled, costs its
own worker at most, and the replacement starts while others grade. A `Service` of the node; called by `scoring`.
"""

import asyncio

from astraflow.errors import PluginError
from astraflow.plugins import Score, TaskSpec
from astraflow_kit.log import get_logger
from astraflow_raas.grading.process import WorkerOrder, WorkerProcess, WorkerRefused, start_worker

log = get_logger(__name__)


class WorkerPool:
    """Grades by `order` in its workers; calls wait for a free one."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._free: asyncio.Queue[_Slot] = asyncio.Queue()
        self._slots: list[_Slot] = []
        self._stopped = asyncio.Event()

    async def score(self, task: TaskSpec, completion: str) -> Score:
        """Grade one completion. Raises RewardFailed, MissingCapability."""
        self._begin()
        slot = await self._free.get()
        worker = None
        try:
            worker = await asyncio.shield(slot.starting)
            return await worker.score(task, completion)
        finally:
            if not self._stopped.is_set() and slot.needs_new(worker):
                slot.replace()
            self._free.put_nowait(slot)

    async def start(self) -> None:
        """Begin to start the workers."""
        self._begin()

    async def run(self) -> None:
        """Wait for the end. Raises PluginError when the workers cannot make the reward at all."""
        self._begin()
        try:
            await asyncio.shield(self._slots[0].starting)
        except WorkerRefused as error:
            raise PluginError(str(error)) from error
        except Exception as error:  # noqa: BLE001 - calls try again, and name it
            log.warning("reward.worker_not_started", message=str(error))
        await self._stopped.wait()

    async def stop(self, *, deadline_s: float) -> None:
        """Kill the workers; calls that still run fail."""
        self._stopped.set()
        async with asyncio.timeout(deadline_s):
            await asyncio.gather(*(slot.end() for slot in self._slots))

    def _begin(self) -> None:
        if not self._slots:
            self._slots = [_Slot(self._order) for _ in range(self._order.limits.processes)]
            for slot in self._slots:
                self._free.put_nowait(slot)


class _Slot:
    """The place of one worker, and of those that come after it."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self.starting = asyncio.create_task(start_worker(order))

    def needs_new(self, worker: WorkerProcess | None) -> bool:
        """Whether `worker`, or its start, can serve no further call."""
        if worker is not None:
            return worker.spent
        return self.starting.done() and self.starting.exception() is not None

    def replace(self) -> None:
        """End the worker and start the next one, without waiting for either."""
        self.starting = asyncio.create_task(self._next(self.starting))

    async def end(self) -> None:
        """End the worker, or its start."""
        await _end(self.starting)

    async def _next(self, before: "asyncio.Task[WorkerProcess]") -> WorkerProcess:
        ending = asyncio.create_task(_end(before))
        try:
            await asyncio.shield(ending)
        finally:
            await ending  # also when the node stops meanwhile
        return await start_worker(self._order)


async def _end(starting: "asyncio.Task[WorkerProcess]") -> None:
    starting.cancel()
    (worker,) = await asyncio.gather(starting, return_exceptions=True)
    if isinstance(worker, WorkerProcess):
        await worker.end()
