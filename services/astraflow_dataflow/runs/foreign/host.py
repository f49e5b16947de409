"""The foreign plug-ins of one kind in a run: their process is started, asked, and replaced when it does not answer.

Invariant: no call waits longer than its deadlines; a call that a process did not answer is made once more by the next
one, and only then is the plug-in at fault. While no process is ready, calls raise UnavailableError: nothing is decided,
and whoever asked comes again. Each host has a process and a thread of its own, so a call that hangs holds up its kind
of its run alone, and the death of a process is nobody's fault but that of the call it died in.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from astraflow.errors import PluginError, UnavailableError
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.runs.foreign.frames import Frame
from astraflow_dataflow.runs.foreign.process import LOST, PluginOrder, PluginProcess, start_process
from astraflow_dataflow.settings import PluginLimits
from astraflow_kit.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 30.0
_TRIES = 2


class PluginHost:
    """The process of the foreign plug-ins of one kind in a run, and those that come after it."""

    def __init__(self, order: PluginOrder, limits: PluginLimits, faults: PluginFaults) -> None:
        self.order, self.limits, self._faults = order, limits, faults
        self.facts: Mapping[str, Any] = {}
        """What the server must know of each plug-in."""
        self._thread = ThreadPoolExecutor(1, "plugin-calls")
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Task[PluginProcess] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._num_failed = 0
        self._unanswered = Counter[tuple[str, str]]()
        """How many processes left a call, by plug-in and what it is about, without an answer."""
        self._closed = False

    async def start(self) -> None:
        """Make the plug-ins, once. Raises PluginError."""
        self._starting = asyncio.create_task(self._start())
        try:
            await asyncio.shield(self._starting)
        except BaseException:
            await self.close()
            raise

    async def run(self, work: Callable[[], T]) -> T:
        """Run what calls the plug-ins, in their thread."""
        if self._closed:
            raise UnavailableError("the plug-ins of the run are closed", retry_after_s=1.0)
        return await self._loop.run_in_executor(self._thread, work)

    async def close(self) -> None:
        """End the process. Calls that run fail with UnavailableError."""
        self._closed = True
        starting, self._starting = self._starting, None
        if starting is not None:
            await self._end(starting)
        await asyncio.gather(*self._ending)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def call(
        self, kind: str, name: str, frame: Callable[[PluginProcess, int], Frame], *, about: str
    ) -> Frame:
        """Ask a plug-in, in its thread; `frame` says what a process is asked, by how many did not answer, and `about`
        tells this call from others.

        Raises PluginError when two processes did not answer, UnavailableError while none is ready.
        """
        key = name, about
        while True:
            process = self._ready()
            until_s = time.monotonic() + self.limits.call_timeout_s
            try:
                with self._faults.running(kind, name):
                    asked = frame(process, self._unanswered[key])
                    answer = process.exchange(asked, until_s=until_s)
            except LOST as error:
                if self._closed:
                    raise UnavailableError("the plug-ins of the run are closed", retry_after_s=1.0) from error
                why = self._why(error)
                log.error("plugin.lost", kind=kind, name=name, pid=process.pid, why=why)
                asyncio.run_coroutine_threadsafe(self._lose(process), self._loop).result()
                self._unanswered[key] += 1
                if self._unanswered[key] < _TRIES:
                    continue
                del self._unanswered[key]
                raise PluginError(
                    f"{name}: a call {why}, in {_TRIES} processes one after the other; make it return"
                ) from error
            self._num_failed = 0
            self._unanswered.pop(key, None)
            return answer

    def _why(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"did not return within plugin_call_timeout_s {self.limits.call_timeout_s:g} s"
        return (
            "ended its process" if isinstance(error, EOFError | OSError) else f"answered nonsense ({error})"
        )

    def _ready(self) -> PluginProcess:
        """The process, waited for as long as a call may take."""
        current = asyncio.run_coroutine_threadsafe(self._current(), self._loop)
        return current.result(timeout=2 * self.limits.call_timeout_s)  # should the loop have ended

    async def _current(self) -> PluginProcess:
        if self._closed:
            raise UnavailableError("the plug-ins of the run are closed", retry_after_s=1.0)
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_again())
        done, _ = await asyncio.wait({self._starting}, timeout=self.limits.call_timeout_s)
        if not done or self._closed:
            raise UnavailableError(
                "the process of the run's plug-ins is not ready; `astraflow why` says what it does",
                retry_after_s=1.0,
            )
        return self._starting.result()

    async def _start_again(self) -> PluginProcess:
        """Start until that succeeds, after longer and longer pauses."""
        while True:
            if self._num_failed > 1:
                await asyncio.sleep(min(_FIRST_BACKOFF_S * 2**self._num_failed, _MAX_BACKOFF_S))
            self._num_failed += 1
            try:
                return await self._start()
            except (PluginError, OSError) as error:
                kind, name, _ = self.order.plugins[0]
                self._faults.note(kind, name, error)
                log.error("plugin.not_started", message=str(error), tries=self._num_failed)

    async def _start(self) -> PluginProcess:
        process = await start_process()
        making = asyncio.create_task(asyncio.to_thread(process.make, self.order, self.limits, self._faults))
        try:
            facts = await asyncio.shield(making)
        except BaseException:
            await process.end()
            await asyncio.gather(making, return_exceptions=True)
            raise
        self.facts = self.facts or facts
        log.info("plugin.started", pid=process.pid, plugins=[name for _, name, _ in self.order.plugins])
        return process

    async def _lose(self, process: PluginProcess) -> None:
        starting = self._starting
        if starting is not None and starting.done() and starting.result() is process:
            self._starting = None
            ending = asyncio.create_task(process.end())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, starting: asyncio.Task[PluginProcess]) -> None:
        starting.cancel()
        (process,) = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(process, PluginProcess):
            await process.end()
