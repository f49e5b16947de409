"""One run of an engine as a child process: start, wait until healthy, end with everything it started.

Invariant: the child leads a process group of its own, and neither it nor anything it started outlives the node or its
own end; its output goes to one bounded log file. `engine_host` starts one after another and decides when to give up on
one.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from astraflow_kit.children import kill_family
from astraflow_kit.family import ending_with_us
from astraflow_kit.lifecycle import ExitCode, failure_in
from astraflow_kit.log import get_logger
from astraflow_kit.log_files import end_of, ended_with_bounded_log
from astraflow_kit.ports import LOOPBACK, free_port
from astraflow_raas.engine.base import EngineUnavailable
from astraflow_raas.engine.command import EngineCommand
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.engine.server_info import EngineUnsuitable
from astraflow_raas.settings import child_environment

log = get_logger(__name__)

_INVALID_MODEL = "INVALID_MODEL"
"""With which the CPU engine ends; a port that was taken just now has another reason and is worth another try."""
_POLL_S = 0.1
_TERM_GRACE_S = 5.0
_LOG_TAIL_BYTES = 4000
_LOG_TAIL_LINES = 4


@dataclass(kw_only=True)
class EngineProcess:
    """A started engine. `engine` talks to it."""

    child: asyncio.subprocess.Process
    engine: HttpEngine
    log_path: Path
    key_file: Path

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.child.returncode is None

    async def wait_healthy(self, *, timeout_s: float) -> None:
        """Return once the engine can sample. Raises EngineUnsuitable when it refused its model, EngineUnavailable when
        it died or took too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._healthy():  # noqa: ASYNC110 - another process has no event to wait for
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise EngineUnavailable(
                f"the engine was not healthy within {timeout_s} s; see {self.log_path}, or raise "
                "engine_start_timeout_s"
            ) from error

    async def ended(self) -> int:
        """Wait for the process to end, its log bounded meanwhile; returns its exit code."""
        return await ended_with_bounded_log(self.child, self.log_path)

    async def end(self) -> None:
        """End the engine, politely first, with everything it started. Idempotent."""
        await self.engine.close()
        with suppress(ProcessLookupError):
            self.child.terminate()
        try:
            await asyncio.wait_for(self.child.wait(), _TERM_GRACE_S)
        except TimeoutError:
            log.warning("engine.ignores_sigterm", pid=self.child.pid)
        await kill_family(self.child)
        self.key_file.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The end of the log and where the whole of it is, for error messages."""
        return "\n".join([*self._end_of_log()[-_LOG_TAIL_LINES:], f"(its whole log: {self.log_path})"])

    def _end_of_log(self) -> list[str]:
        return end_of(self.log_path, num_bytes=_LOG_TAIL_BYTES).strip().splitlines()

    async def _healthy(self) -> bool:
        if not self.alive:
            reason, message = failure_in(self._end_of_log()) or ("", "")
            if self.child.returncode == ExitCode.USAGE and reason == _INVALID_MODEL:
                raise EngineUnsuitable(f"the engine cannot serve the model: {message}")
            raise EngineUnavailable(f"the engine ended with code {self.child.returncode}:\n{self.log_tail()}")
        try:
            await self.engine.check_health()
        except EngineUnavailable:
            return False
        return True


async def start_engine(
    command: EngineCommand,
    *,
    model_dir: Path,
    version: int,
    log_path: Path,
    connect: Callable[..., HttpEngine] = HttpEngine,
    choose_port: Callable[[], int] = free_port,
) -> EngineProcess:
    """Start an engine on a free port, under a key of its own, and `connect(url, api_key=…)` to it; it is not healthy
    yet. Raises EngineUnavailable when it cannot be started."""
    port, key, key_file = choose_port(), token_hex(32), log_path.with_suffix(".yaml")
    _write_private(key_file, command.key_file_content(key))
    argv = command.argv(model_dir=model_dir, version=version, port=port, key_file=key_file)
    with log_path.open("ab") as output:
        try:
            child = await asyncio.create_subprocess_exec(
                *ending_with_us(*argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=command.environment(child_environment()),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineUnavailable(f"cannot start {argv[0]}: {error}") from error
    log.info(
        "engine.started", pid=child.pid, port=port, kind=command.kind, version=version, log=str(log_path)
    )
    engine = connect(f"http://{LOOPBACK}:{port}", api_key=key)
    return EngineProcess(child=child, engine=engine, log_path=log_path, key_file=key_file)


def _write_private(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(content)
