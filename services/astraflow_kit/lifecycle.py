"""The life of a daemon process: start, drain on a signal, stop within a deadline, an exit code that tells
why.

Invariant: the first SIGTERM or SIGINT asks for a drain, the second or the drain's deadline ends the
process whatever it is doing; services start in order and stop in reverse. `__main__` modules call `run`;
the launcher reads the exit code and the address file, and its death ends the daemon through
`die_with_parent`.
"""

import asyncio
import faulthandler
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from astraflow.errors import (
    AstraflowError,
    PermissionError_,
    RequestError,
    RetryableError,
    StateError,
    UnauthenticatedError,
    UnimplementedError,
)
from astraflow_kit import failpoints, traces
from astraflow_kit import log as log_lines
from astraflow_kit.allocator import share_arenas
from astraflow_kit.log import get_logger
from astraflow_kit.parent import die_with_parent
from astraflow_kit.plugins import LIBRARIES
from astraflow_kit.settings import ProcessSettings

log = get_logger(__name__)

STACK_SIGNAL = signal.SIGUSR2
"""Asks a daemon to write to its log what its main thread is in; it does so even when no other Python code runs."""
_STACK_BEGINS, _FRAME = "(most recent call first):", re.compile(r' +File "(.+)", line (\d+) in (.+)')
_HARD_STOP_GRACE_S = 5.0
# Starting the same process again cannot mend these: somebody must change its settings, token or recipe.
_WRONG_USE = (RequestError, UnauthenticatedError, PermissionError_, UnimplementedError)


class ExitCode(IntEnum):
    """Why a daemon ended, and what its supervisor should do."""

    OK = 0  # finished or drained: leave it
    FAILED = 1  # a defect, its log has the cause: restart with backoff
    USAGE = 2  # wrong settings, token, recipe or plug-in, or a taken port: show the message, do not restart
    SUPERSEDED = 3  # fenced or incompatible, another process owns its work: do not restart
    UNAVAILABLE = 75  # something it depends on did not answer: restart with backoff
    DRAIN_TIMEOUT = 124  # the drain did not finish within its deadline
    HARD_STOP = 130  # a second signal came


class Service(Protocol):
    """A part of a daemon with a life of its own: a server, a watcher, a loop."""

    async def start(self) -> None:
        """Bind or connect; return once usable. An error ends the daemon."""

    async def run(self) -> None:
        """Work until done or until `stop` was called. An error ends the daemon; returning drains it."""

    async def stop(self, *, deadline_s: float) -> None:
        """Finish what is in hand and make `run` return, within `deadline_s` seconds."""


class Lifecycle:
    """Where a running daemon learns that it should end, and how long it has for that."""

    def __init__(self, main: asyncio.Task[Any] | None = None, *, drain_timeout_s: float) -> None:
        self.drain = asyncio.Event()
        """Set when the daemon should take no new work, finish what it holds and end."""
        self.started = asyncio.Event()
        """Set when every service has started."""
        self.exit_code: ExitCode | None = None
        self._main = main
        self._drain_timeout_s = drain_timeout_s
        self._deadline_s: float | None = None
        self._signalled = False

    def remaining_s(self) -> float:
        """Seconds left for stopping."""
        if self._deadline_s is None:
            return self._drain_timeout_s
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    def begin_drain(self) -> None:
        """Ask for a drain and start its deadline; later calls change nothing."""
        if self._deadline_s is not None:
            return
        loop = asyncio.get_running_loop()
        self._deadline_s = loop.time() + self._drain_timeout_s
        self.drain.set()
        loop.call_later(self._drain_timeout_s, self._stop_hard, ExitCode.DRAIN_TIMEOUT)

    def on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, stop hard on the second. A drain begun otherwise is not a first signal."""
        if self._signalled:
            self._stop_hard(ExitCode.HARD_STOP)
            return
        self._signalled = True
        log.info("daemon.draining", signal=number.name, deadline_s=self._drain_timeout_s)
        self.begin_drain()

    def _stop_hard(self, code: ExitCode) -> None:
        log.warning("daemon.stopped_hard", why=code.name.lower())
        self.exit_code = code
        if self._main is not None:
            self._main.cancel()
        # Code that ignores cancellation, or a thread that never ends, must not keep a dead daemon around.
        asyncio.get_running_loop().call_later(_HARD_STOP_GRACE_S, os._exit, int(code))


Main = Callable[[Lifecycle], Coroutine[Any, Any, None]]


def run(main: Main, *, drain_timeout_s: float = 30.0) -> int:
    """Run a daemon's `main` and return the exit code for `sys.exit`. Errors are logged, never raised."""
    try:
        code = asyncio.run(_supervised(main, drain_timeout_s=drain_timeout_s))
    finally:
        traces.end()
    log.info("daemon.ended", exit_code=int(code), why=code.name.lower())
    return int(code)


def begin(service: str, settings: ProcessSettings) -> None:
    """What every daemon does first: share arenas, say where it stands when asked, die with its launcher, set up its
    log, arm failpoints, record traces. Raises SettingsError.
    """
    share_arenas()
    faulthandler.register(STACK_SIGNAL, file=sys.__stderr__ or sys.stderr, all_threads=False)
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    log_lines.configure(service, level=settings.log_level, log_format=settings.log_format)
    failpoints.arm(settings.failpoints, seed=settings.failpoints_seed, log_path=settings.failpoints_log)
    if settings.traces:
        traces.begin(service)


async def run_services(
    services: Sequence[Service], *, lifecycle: Lifecycle, on_started: Callable[[], None] = lambda: None
) -> None:
    """Start `services` in order, call `on_started`, wait for a drain, an end or a failure, stop in reverse.

    Raises the failures of services as an ExceptionGroup, after everything was stopped.
    """
    async with asyncio.TaskGroup() as group, AsyncExitStack() as started:
        for service in services:
            await service.start()
            started.push_async_callback(_stop, service, lifecycle=lifecycle)
            group.create_task(_run(service, lifecycle=lifecycle), name=type(service).__name__)
        on_started()
        lifecycle.started.set()
        await lifecycle.drain.wait()


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where a running daemon listens, as `host:port`; empty when it does not."""

    grpc: str = ""
    http: str = ""
    probe: str = ""
    scaler: str = ""
    pid: int = field(default_factory=os.getpid)


def write_address_file(path: Path | None, addresses: Addresses) -> None:
    """Publish `addresses` atomically: a reader sees the whole file or none. Does nothing without a path."""
    if path is None:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(addresses)) + "\n")
    draft.replace(path)


def read_address_file(path: Path) -> Addresses | None:
    """What a daemon published, or None when it has not yet."""
    return Addresses(**json.loads(path.read_text())) if path.exists() else None


async def _supervised(main: Main, *, drain_timeout_s: float) -> ExitCode:
    lifecycle = Lifecycle(asyncio.current_task(), drain_timeout_s=drain_timeout_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lifecycle.on_signal, number)
    try:
        await main(lifecycle)
    except asyncio.CancelledError:
        return lifecycle.exit_code or ExitCode.HARD_STOP
    except Exception as error:  # noqa: BLE001 - the edge of the process: every failure becomes an exit code
        return lifecycle.exit_code or _report(_first_cause(error))
    return lifecycle.exit_code or ExitCode.OK


async def _run(service: Service, *, lifecycle: Lifecycle) -> None:
    await service.run()
    lifecycle.begin_drain()


async def _stop(service: Service, *, lifecycle: Lifecycle) -> None:
    await service.stop(deadline_s=lifecycle.remaining_s())


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _report(error: BaseException) -> ExitCode:
    if not isinstance(error, AstraflowError):
        log.error("daemon.failed", exc_info=error)
        return ExitCode.FAILED
    log.error("daemon.failed", reason=error.reason, message=error.message)
    return exit_code_of(error)


def failure_in(lines: Sequence[str]) -> tuple[str, str] | None:
    """Reason and message that a daemon ended with, from the end of its log; None where it is not JSON, or has none."""
    for line in reversed(lines):
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "daemon.failed":
                reason, message = event.get("reason"), event.get("message")
                return (str(reason), str(message)) if reason and message else None
    return None


def place_in(lines: Sequence[str]) -> str:
    """`function (file:line)` where a process stood at its last `STACK_SIGNAL`, by the end of its log; of what it stood
    in, the innermost that is no library's. Empty without one.
    """
    began = max(
        (number for number, line in enumerate(lines) if line.endswith(_STACK_BEGINS)), default=len(lines)
    )
    frames = [found.groups() for line in lines[began:] if (found := _FRAME.fullmatch(line))]
    own = [frame for frame in frames if not frame[0].startswith(LIBRARIES)]
    return next((f"{function} ({Path(file).name}:{number})" for file, number, function in own or frames), "")


def exit_code_of(error: AstraflowError) -> ExitCode:
    """The status with which a daemon, or its `--check`, ends because of `error`."""
    if isinstance(error, _WRONG_USE):
        return ExitCode.USAGE
    if isinstance(error, StateError):
        return ExitCode.SUPERSEDED
    return ExitCode.UNAVAILABLE if isinstance(error, RetryableError) else ExitCode.FAILED
