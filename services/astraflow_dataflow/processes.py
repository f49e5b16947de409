"""Several server processes behind one address: each is a whole server, and the kernel spreads connections over them.

Nothing is shared but Redis, so a process that dies takes only its own connections with it, whose callers call again; it
is started anew. This process holds the port and serves nobody. Started by `__main__` where the settings ask for it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_kit import lifecycle
from astraflow_kit.lifecycle import Addresses, ExitCode, read_address_file
from astraflow_kit.log import get_logger
from astraflow_kit.parent import dying_with_us, python
from astraflow_kit.ports import bind_failure
from astraflow_kit.settings import environment_of

log = get_logger(__name__)

# Starting it again cannot mend these.
_FATAL = (ExitCode.USAGE, ExitCode.SUPERSEDED)
_FIRST_WAIT_S, _MAX_WAIT_S = 0.2, 5.0
_STEADY_S = 30.0
_LOOK_EVERY_S = 0.05


def run(settings: DataflowServerSettings) -> int:
    """Serve by `settings.processes` processes until told to stop; the exit code for `sys.exit`."""
    return lifecycle.run(lambda life: _serve(settings, life), drain_timeout_s=settings.drain_timeout_s)


async def _serve(settings: DataflowServerSettings, life: lifecycle.Lifecycle) -> None:
    with _reserved(settings) as held, tempfile.TemporaryDirectory(prefix="astraflow-") as folder:
        ports = {"grpc_port": held.getsockname()[1], "share_port": True, "processes": 1, "parent_pid": None}
        processes = [
            _Process(settings.model_copy(update=ports), number, life, folder=Path(folder))
            for number in range(settings.processes)
        ]
        async with asyncio.TaskGroup() as group:
            for process in processes:
                group.create_task(process.keep(), name=process.name)
            group.create_task(_announce(settings, processes, life), name="announcement")


def _reserved(settings: DataflowServerSettings) -> socket.socket:
    """A socket that holds the port for the processes, and takes no connection. Raises PortError for a taken one."""
    family, kind, _, _, address = socket.getaddrinfo(
        settings.host, settings.grpc_port, type=socket.SOCK_STREAM
    )[0]
    try:
        with socket.socket(family, kind) as probe:  # another server, which may share its port as well
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        held = socket.socket(family, kind)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        raise bind_failure(settings.host, settings.grpc_port, setting="grpc_port") from error
    return held


async def _announce(
    settings: DataflowServerSettings, processes: list[_Process], life: lifecycle.Lifecycle
) -> None:
    """Say where the server is when all of its processes serve."""
    while not all(process.addresses for process in processes):
        if life.drain.is_set():
            return
        await asyncio.sleep(_LOOK_EVERY_S)
    first = processes[0].addresses
    if first is not None:
        addresses = Addresses(grpc=first.grpc, http=first.http, probe=first.probe, scaler=first.scaler)
        lifecycle.write_address_file(settings.address_file, addresses)
        log.info("dataflow.ready", grpc=first.grpc, http=first.http, processes=len(processes))
    life.started.set()


class _Process:
    """One of the processes, across its restarts."""

    def __init__(
        self, settings: DataflowServerSettings, number: int, life: lifecycle.Lifecycle, *, folder: Path
    ) -> None:
        self.name = f"dataflow-{number + 1}"
        self._life = life
        self._address_file = folder / f"{self.name}.json"
        own: dict[str, object] = {"address_file": self._address_file}
        for port in ("http_port", "probe_port"):
            if asked := getattr(settings, port):
                own[port] = asked + number
        if number:
            own |= {"scaler_port": None, "scaler_client_ca_file": None}
        self._variables = environment_of(settings.model_copy(update=own))

    @property
    def addresses(self) -> Addresses | None:
        """Where it listens, once it said so."""
        return read_address_file(self._address_file)

    async def keep(self) -> None:
        """Keep it running until the server drains. Settings that it refuses end all."""
        wait_s = _FIRST_WAIT_S
        while not self._life.drain.is_set():
            began_s = time.monotonic()
            code = await self._run_once()
            if self._life.drain.is_set():
                return
            if code in _FATAL:
                self._life.exit_code = ExitCode(code)
                self._life.begin_drain()
                return
            wait_s = (
                _FIRST_WAIT_S if time.monotonic() - began_s >= _STEADY_S else min(_MAX_WAIT_S, 2 * wait_s)
            )
            log.warning("process.restarting", process=self.name, exit_code=code, wait_s=wait_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._life.drain.wait(), wait_s)

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *dying_with_us(*python("astraflow_dataflow")),
            env=self._variables,
            start_new_session=True,  # signals of a terminal reach it once, from here
        )
        log.info("process.started", process=self.name, pid=process.pid)
        ended, draining = (asyncio.create_task(until) for until in (process.wait(), self._life.drain.wait()))
        try:
            await asyncio.wait([ended, draining], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                process.send_signal(signal.SIGTERM)
            return await ended
        finally:
            draining.cancel()
            if process.returncode is None:
                process.kill()
