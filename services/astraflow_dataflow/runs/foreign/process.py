"""A process of a run's foreign plug-ins, seen from the server: started, asked, killed with everything it started.

Invariant: a call ends at its deadline, whatever the plug-in does; a process that did not answer one is never asked
again. What plug-ins print is logged, as much as a log can take; beyond that their `print` waits. Kept by `host`.
"""

import asyncio
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.errors import PluginError
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.runs.foreign.frames import Frame, receive, send
from astraflow_dataflow.settings import PluginLimits, plugin_environment
from astraflow_kit.children import kill_family
from astraflow_kit.family import ending_with_us
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_MAX_PHASES = 256
_PYTHON_STARTS_S = 60.0
"""Longest time before a plug-in's code is reached, which is ours."""
_PRINTED_BYTES, _PRINTED_EVERY_S = 4096, 0.1
LOST = (TimeoutError, EOFError, OSError, ValueError, LookupError, TypeError)
"""How an exchange fails with a process that hangs, ended, or answers nonsense."""


@dataclass(frozen=True, kw_only=True)
class PluginOrder:
    """Which plug-ins a process makes."""

    source: str
    """What errors call the recipe."""
    recipe: str
    folder: Path | None
    """Where the recipe's code lies, if it may be run."""
    plugins: Sequence[tuple[str, str, int]]
    """Kind, name, and place among those of its kind in the recipe."""
    tasks_per_epoch: int | None = None
    """Of the data set, for the other kinds."""

    def frame(self, limits: PluginLimits) -> Frame:
        """The first message."""
        head = {**vars(self), "folder": str(self.folder or ""), "memory_mb": limits.memory_mb}
        return Frame(head)


class PluginProcess:
    """A started process."""

    def __init__(
        self, child: asyncio.subprocess.Process, sock: socket.socket, printed: socket.socket
    ) -> None:
        self._child = child
        self._sock = sock
        self._printing = asyncio.create_task(self._log_printed(printed))
        self.pid = child.pid

    def make(self, order: PluginOrder, limits: PluginLimits, faults: PluginFaults) -> Mapping[str, Any]:
        """Have it make the plug-ins, in a thread; return what the server must know of them. Raises PluginError naming
        the plug-in, what it did last, and the remedy.
        """
        until_s = time.monotonic() + _PYTHON_STARTS_S
        doing = kind, name, phase = "", "", "starting Python"
        with ExitStack() as running:
            try:
                send(self._sock, order.frame(limits), until_s=until_s)
                for _ in range(_MAX_PHASES):
                    said = receive(self._sock, until_s=until_s).head
                    if "phase" not in said:
                        break
                    if not kind:  # no code of the recipe has run yet
                        until_s = time.monotonic() + limits.start_timeout_s
                    kind, name, phase = doing = said["kind"], said["name"], said["phase"]
                    running.close()
                    running.enter_context(faults.running(kind, name, phase))
                if "refused" in said:
                    raise PluginError(said["refused"])
                return dict(said["ready"])
            except LOST as error:
                raise PluginError(_not_made(order, doing, error, limits)) from error

    def exchange(self, asked: Frame, *, until_s: float) -> Frame:
        """Ask, in a thread. Raises what `LOST` names."""
        send(self._sock, asked, until_s=until_s)
        return receive(self._sock, until_s=until_s)

    async def end(self) -> None:
        """Kill it with everything it started. Idempotent."""
        await kill_family(self._child)
        self._printing.cancel()
        await asyncio.gather(self._printing, return_exceptions=True)
        self._sock.close()

    async def _log_printed(self, printed: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=printed, limit=_PRINTED_BYTES)
        try:
            while text := await reader.read(_PRINTED_BYTES):
                log.info("plugin.printed", pid=self.pid, text=text.decode(errors="replace"))
                await asyncio.sleep(_PRINTED_EVERY_S)
        finally:
            writer.close()


async def start_process() -> PluginProcess:
    """Start Python. Raises OSError."""
    (ours, theirs), (printed, printed_there) = socket.socketpair(), socket.socketpair()
    module = "astraflow_dataflow.runs.foreign.worker"
    try:
        child = await asyncio.create_subprocess_exec(
            *ending_with_us(sys.executable, "-P", "-m", module, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=printed_there.fileno(),
            env=plugin_environment(),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        printed.close()
        raise
    finally:
        theirs.close()
        printed_there.close()
    return PluginProcess(child, ours, printed)


def _not_made(
    order: PluginOrder, doing: tuple[str, str, str], error: BaseException, limits: PluginLimits
) -> str:
    kind, name, phase = doing
    what = f"{kind} {name!r}: {phase}" if kind else f"its plug-ins: {phase}"
    if isinstance(error, TimeoutError):
        return (
            f"{order.source}: {what} did not return within plugin_start_timeout_s {limits.start_timeout_s:g} s; its "
            "process was killed; load less there, or start the server with a larger --plugin-start-timeout-s"
        )
    ended = "ended its process" if isinstance(error, EOFError | OSError) else f"answered nonsense ({error})"
    return (
        f"{order.source}: {what} {ended}; code that ends or kills its process, or needs more than plugin_memory_mb "
        f"{limits.memory_mb} MiB in a library, cannot be a plug-in"
    )
