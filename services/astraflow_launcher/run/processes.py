"""Child processes: started with a bounded log file each, restarted with backoff, and never outliving the launcher.

Invariant: every child runs in its own process group and dies with this process even when it is SIGKILLed; a child
that ends with `ExitCode.OK` is finished, one that ends with USAGE or SUPERSEDED is a fatal error (but for one whose
name another took, if it waits for that), any other end is restarted with the same arguments and ports.
`development_run` owns the only Supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.errors import (
    AstraflowError,
    InternalError,
    InvalidArgumentError,
    PreconditionError,
    UnavailableError,
)
from astraflow_kit.lifecycle import STACK_SIGNAL, Addresses, ExitCode, failure_in, place_in, read_address_file
from astraflow_kit.log import get_logger
from astraflow_kit.log_files import MAX_BYTES, end_of, ended_with_bounded_log
from astraflow_kit.parent import dying_with_us

log = get_logger(__name__)

_FATAL: Mapping[int, type[AstraflowError]] = {
    ExitCode.USAGE: InvalidArgumentError,
    ExitCode.SUPERSEDED: PreconditionError,
    -signal.SIGPROF: InvalidArgumentError,
}
_HELD_LOCK = (
    "a plug-in of the recipe held the interpreter's lock beyond plugin_start_timeout_s, where its stack says"
)
"""What the end by SIGPROF means (`astraflow_kit.making`)."""
_READY_POLL_S = 0.05
_LOG_TAIL_BYTES, _LOG_TAIL_LINES = 2**16, 12
# A killed server should answer again within 3 s, most of which its own start takes.
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
# A child that lived this long had started well: its end is news, not a repetition.
_STEADY_S = 5.0
_STACK_S = 0.5
"""For a process that stands still to say where, before it is killed."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to run and how to treat its end."""

    name: str
    argv: tuple[str, ...]
    log_path: Path
    max_log_bytes: int = MAX_BYTES
    """At which the log is rotated."""
    env: Mapping[str, str] = field(default_factory=dict)
    address_file: Path | None = None
    group: str = ""
    """Children of one group end and start again together; empty for a child on its own."""
    group_grace_s: float = 20.0
    """Time for the others of the group to notice by themselves, before they are ended."""
    max_restarts: int = 8
    """Restarts within `restart_window_s` before the child counts as broken."""
    restart_window_s: float = 60.0
    returns_when_fenced: bool = False
    """Whether it is started again where another process acts under its name: it waits for that one's end."""


class Child:
    """One supervised process, across its restarts."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.last_end = ""
        """How the process before this one ended, and why where it said so."""
        self.finished = asyncio.Event()
        """Set when the child ended and will not be started again."""
        self.exit_code: int | None = None
        self._recent: deque[float] = deque()
        self._quick_ends = 0
        self._replaced: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.companions: list[Child] = []
        """The other children of its group."""

    @property
    def running(self) -> bool:
        """Whether a process is alive now."""
        return self.process is not None and self.process.returncode is None

    @property
    def addresses(self) -> Addresses | None:
        """Where the current process listens, once it said so."""
        found = read_address_file(self.spec.address_file) if self.spec.address_file else None
        return (
            found
            if found is not None and self.process is not None and found.pid == self.process.pid
            else None
        )

    async def supervise(self) -> None:
        """Keep the child running until it finishes, breaks, or is stopped. Raises InternalError when it
        breaks, InvalidArgumentError when it says that it is used wrongly, PreconditionError when its work is another's.
        """
        try:
            while not self._stopping.is_set():
                started_s = time.monotonic()
                self.exit_code = await self._run_once()
                if self._stopping.is_set() or self.exit_code == ExitCode.OK:
                    return
                self._refuse_when_broken()
                await self._end_companions()
                self.restarts += 1
                self.last_end = self._last_end()
                wait_s = self._backoff_s(lived_s=time.monotonic() - started_s)
                log.warning("child.restarting", child=self.spec.name, exit_code=self.exit_code, wait_s=wait_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait_s)
                    return
        finally:
            self.finished.set()

    async def _run_once(self) -> int:
        with self.spec.log_path.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *dying_with_us(*self.spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.spec.env},
                start_new_session=True,
            )
        log.info("child.started", child=self.spec.name, pid=self.process.pid)
        if self._stopping.is_set():  # asked for while it was being started
            self.process.send_signal(signal.SIGTERM)
        try:
            return await ended_with_bounded_log(
                self.process, self.spec.log_path, max_bytes=self.spec.max_log_bytes
            )
        finally:
            log.info("child.ended", child=self.spec.name, pid=self.process.pid)
            if self.process.returncode is None:
                _signal_group(self.process, signal.SIGKILL)

    async def _end_companions(self) -> None:
        """Return once the processes that ran beside the one that ended have ended too; they are given a while
        to notice by themselves, and to say so with their own status.
        """
        beside = [other.process for other in self.companions if other.running and other.process is not None]
        for process in beside:
            try:
                await asyncio.wait_for(process.wait(), self.spec.group_grace_s)
            except TimeoutError:
                log.warning("child.ended_with_its_group", child=self.spec.name, pid=process.pid)
                _signal_group(process, signal.SIGKILL)
                await process.wait()

    def _backoff_s(self, *, lived_s: float) -> float:
        self._quick_ends = 0 if lived_s >= _STEADY_S else self._quick_ends + 1
        return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * float(2**self._quick_ends))

    def _refuse_when_broken(self) -> None:
        now = time.monotonic()
        self._recent.append(now)
        while self._recent and now - self._recent[0] > self.spec.restart_window_s:
            self._recent.popleft()
        failure = failure_in(self._end_of_log()) if self.exit_code in _FATAL else None
        if self.spec.returns_when_fenced and failure is not None and failure[0] == "FENCED":
            return
        if self.exit_code in _FATAL or len(self._recent) > self.spec.max_restarts:
            # What a child calls wrong use, or another's work, is that here as there: with the same status.
            kind = _FATAL.get(self.exit_code or 0, InternalError)
            ended = f"{self.spec.name} ended with status {self.exit_code} and will not be started again"
            if self.exit_code == -signal.SIGPROF:
                ended += f": {_HELD_LOCK}"
            if failure is not None:
                raise kind(f"{ended}: {': '.join(failure)}\nIts log: {self.spec.log_path}")
            raise kind(f"{ended}.\nThe end of its log {self.spec.log_path}:\n{self.log_tail()}")

    def _last_end(self) -> str:
        # A killed process says nothing: what stands at the end of its log is older.
        said = failure_in(self._end_of_log()) if (self.exit_code or 0) > 0 else None
        place = place_in(self._log_lines()) if self.process is self._replaced else ""
        why = f": {', '.join(said)}" if said else f", see {self.spec.log_path}"
        return f"status {self.exit_code}{f', it stood still in {place}' if place else ''}{why}"

    def replace(self) -> None:
        """Kill the process, which is alive and stands still, once it could say where: it is started again as when it
        dies.
        """
        if self.process is None or not self.running or self.process is self._replaced:
            return
        self._replaced = self.process
        log.warning("child.replaced", child=self.spec.name, pid=self.process.pid)
        if self.addresses is not None:  # a daemon of ours, which knows the signal by now
            self.process.send_signal(STACK_SIGNAL)
        asyncio.get_running_loop().call_later(_STACK_S, _kill, self.process)

    def retire(self) -> None:
        """Ask the process to drain, and wait for nothing: it ends in its own time and is not started again."""
        self._stopping.set()
        if self.process is not None and self.running:
            self.process.send_signal(signal.SIGTERM)

    def log_tail(self) -> str:
        """The last lines of the child's log."""
        return "\n".join(f"  {line}" for line in self._end_of_log()) or "  (empty)"

    def _end_of_log(self) -> list[str]:
        return self._log_lines()[-_LOG_TAIL_LINES:]

    def _log_lines(self) -> list[str]:
        return end_of(self.spec.log_path, num_bytes=_LOG_TAIL_BYTES).splitlines()

    async def stop(self, *, grace_s: float) -> None:
        """Ask the child to drain, and end its process group when it has not within `grace_s`."""
        self._stopping.set()
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            log.warning("child.killed", child=self.spec.name, grace_s=grace_s)
        finally:
            # Also after an orderly end: a child may leave a grandchild behind.
            _signal_group(process, signal.SIGKILL)


class Supervisor:
    """Owns all children. Use as an async context manager: leaving it ends every child in reverse order."""

    def __init__(self, *, stop_grace_s: float = 10.0) -> None:
        self.children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop_grace_s = stop_grace_s

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child; it is supervised from now on."""
        if spec.address_file is not None:
            spec.address_file.unlink(missing_ok=True)
        child = Child(spec)
        for other in self.children.values():
            if spec.group and other.spec.group == spec.group:
                other.companions.append(child)
                child.companions.append(other)
        self.children[spec.name] = child
        self._tasks[spec.name] = asyncio.create_task(child.supervise(), name=spec.name)
        return child

    async def wait_ready(self, child: Child, *, timeout_s: float) -> Addresses:
        """Return the child's addresses once it has published them.

        Raises the child's own failure, or UnavailableError after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.raise_failures()
            addresses = child.addresses
            if addresses is not None:
                return addresses
            await asyncio.sleep(_READY_POLL_S)
        raise UnavailableError(
            f"{child.spec.name} did not become ready within {timeout_s:.0f} s; the end of its log "
            f"{child.spec.log_path}:\n{child.log_tail()}"
        )

    def raise_failures(self) -> None:
        """Raise the failure of a child that will not be started again, if there is one."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    async def stop(self, name: str) -> None:
        """Stop one child with grace; stopping twice, or one that ended, is harmless."""
        child = self.children[name]
        await child.stop(grace_s=self._stop_grace_s)
        task = self._tasks[name]
        with contextlib.suppress(InternalError, *_FATAL.values()):
            await asyncio.wait_for(asyncio.shield(task), self._stop_grace_s)

    async def stop_all(self) -> None:
        """Stop every child, the last started first."""
        for name in reversed(list(self.children)):
            await self.stop(name)

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop_all()
        for task in self._tasks.values():
            task.cancel()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        _signal_group(process, signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
