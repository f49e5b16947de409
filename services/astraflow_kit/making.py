"""Making a recipe's plug-ins beside a daemon's event loop: named while it lasts, within a deadline and a memory limit.

Invariant: what a recipe runs at its import and in its constructors has a thread of its own, so the daemon goes on
answering; past the deadline whoever waits gets a PluginError that says which plug-in stands where, and the log has the
stack. Code that keeps the interpreter's lock lets nobody look: a timer of the kernel ends the process then, with the
status of SIGPROF and all stacks in its log. Nodes, trainers and `recipe check` make plug-ins by it; the dataflow server
runs them in processes of their own.
"""

import asyncio
import faulthandler
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from astraflow.errors import PluginError
from astraflow_kit.awake import Silence
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import LIBRARIES, made_in
from astraflow_kit.settings import CommandOption, ProcessSettings

log = get_logger(__name__)

T = TypeVar("T")

SHOWN_S = 3.0
"""A making that takes longer is a wait."""
_LOOK_S = 0.25
_CORES_AT_WORK = 4
"""One in so many may compute all the time between two looks without being taken for one that keeps the lock."""


@dataclass(frozen=True, kw_only=True)
class MakingLimits:
    """What the makers of plug-ins may take."""

    timeout_s: float = 60.0
    memory_mb: int = 8192


class MakingSettings(ProcessSettings):
    """Limits of a process that makes plug-ins for itself; longer than the server's, for it also imports what its own
    work needs."""

    plugin_start_timeout_s: Annotated[float, Field(gt=0, le=3600), CommandOption("The recipe's plug-ins")] = (
        MakingLimits.timeout_s
    )
    """Time in which the plug-ins of the recipe are imported and made, all together."""
    plugin_memory_mb: Annotated[int, Field(ge=64, le=1_048_576)] = MakingLimits.memory_mb
    """Memory in MiB that the process may take more by importing and making them."""

    @property
    def making(self) -> MakingLimits:
        """The limits."""
        return MakingLimits(timeout_s=self.plugin_start_timeout_s, memory_mb=self.plugin_memory_mb)


class Making(Generic[T]):
    """Plug-ins that are being made, from now on; one at a time in a process."""

    def __init__(self, work: Callable[[], T], limits: MakingLimits) -> None:
        self._limits, self._outcome, self._silence = limits, Future[T](), Silence(period_s=_LOOK_S)
        self._thread = threading.Thread(target=self._run, args=(work,), name="plugin-making", daemon=True)
        self._doing, self._made_s = "", 0.0
        self._end = _bounded(limits)
        self._look()
        self._thread.start()

    @property
    def told(self) -> str:
        """What is being made, and for how long, for people."""
        return f"{self._doing or 'its plug-ins'} has not returned for {self._made_s:.0f} s"

    def made(self, say: Callable[[str], None] = lambda told: None) -> T:
        """What was made; `say` is called again and again with `told` when it takes longer than usual. Raises what the
        making does, PluginError at the deadline.
        """
        try:
            while not wait((self._outcome,), timeout=_LOOK_S).done:
                self._look(say)
            return self._outcome.result()
        finally:
            self._end()

    async def made_beside(self, say: Callable[[str], None] = lambda told: None) -> T:
        """The same, for an event loop, which goes on."""
        outcome = asyncio.wrap_future(self._outcome)
        try:
            while not (await asyncio.wait((outcome,), timeout=_LOOK_S))[0]:
                self._look(say)
            return outcome.result()
        finally:
            self._end()

    def _run(self, work: Callable[[], T]) -> None:
        self._outcome.set_running_or_notify_cancel()  # whoever stops waiting cancels nothing here
        try:
            self._outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised to whoever waits
            self._outcome.set_exception(self._named(error))

    def _named(self, error: BaseException) -> BaseException:
        """The error; where memory did not suffice, with the limit."""
        limit = out_of_memory(error, self._limits.memory_mb)
        return PluginError(f"{error}{limit}") if limit else error

    def _look(self, say: Callable[[str], None] = lambda told: None) -> None:
        """Raise PluginError when the time is over. Whoever cannot look for so long is held up by the plug-in."""
        cores = max(1, (os.cpu_count() or 1) // _CORES_AT_WORK)
        signal.setitimer(signal.ITIMER_PROF, self._limits.timeout_s * cores)
        self._made_s = self._silence.look(self)
        self._doing = made_in(self._thread.ident)
        if self._made_s >= self._limits.timeout_s and not self._outcome.done():
            raise self._hung()
        if self._made_s >= SHOWN_S:
            say(self.told)

    def _hung(self) -> PluginError:
        stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
        log.error("plugin.hung", plugin=self._doing, stack="".join(stack.format()))
        own = [frame for frame in stack if not frame.filename.startswith(LIBRARIES)]
        places = [
            f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in (own or stack)[-1:]
        ]
        return PluginError(
            f"{self._doing or 'a plug-in'} did not return within plugin_start_timeout_s {self._limits.timeout_s:g} s"
            f"{''.join(f', it stood in {place}' for place in places)}; load less there, or start this with a larger "
            "--plugin-start-timeout-s"
        )


def out_of_memory(error: BaseException | None, memory_mb: int) -> str:
    """What to add to the text of an error that comes of the memory limit; empty for another one."""
    while error is not None:
        if isinstance(error, MemoryError):
            return (
                f"; its process may use plugin_memory_mb {memory_mb} MiB: keep less in memory, or start it with a "
                "larger --plugin-memory-mb"
            )
        error = error.__cause__ or error.__context__
    return ""


def _bounded(limits: MakingLimits) -> Callable[[], None]:
    """Bound the process's memory, and have the kernel's timer write all stacks before it ends the process; what is
    returned takes that back.
    """
    faulthandler.register(signal.SIGPROF, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=True)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if sys.platform == "linux":
        most = _data_bytes() + limits.memory_mb * 2**20
        known = [most, *(bound for bound in before if bound != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(known), before[1]))

    def end() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.unregister(signal.SIGPROF)
        resource.setrlimit(resource.RLIMIT_DATA, before)

    return end


def _data_bytes() -> int:
    """What the kernel counts for RLIMIT_DATA of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next((line.split()[1] for line in lines if line.startswith("VmData:")), "0")
    return int(kib) * 1024
