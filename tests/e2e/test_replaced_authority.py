"""The authority of an installation is replaced under a training run: every certificate, its key, and all that a join
string says. No process starts again, and training continues.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from astraflow_kit.ports import free_port
from support.cli import run
from support.development import NOISY, ROOT, SMALL, wait_for
from support.valkey import ValkeyServer

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(400)]

STEPS_BEFORE, STEPS_AFTER = 2, 3
PATIENCE_S = 120.0


class Gateway:
    """What callers dial in place of the server, by as many addresses as are opened; it can cut all connections."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []

    def open(self) -> str:
        """Another address that leads to the server."""
        port = free_port()
        opening = asyncio.start_server(self._serve, "127.0.0.1", port)
        self._servers.append(asyncio.run_coroutine_threadsafe(opening, self._loop).result(PATIENCE_S))
        return f"127.0.0.1:{port}"

    def close_all(self, *, but_last: bool = False) -> None:
        """Close the addresses so far, and cut every connection."""

        async def close() -> None:
            for server in self._servers[: -1 if but_last else None]:
                server.close()
            for writer in self._writers:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(PATIENCE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers |= {writer, to_server[1]}
        await asyncio.gather(self._pump(reader, to_server[1]), self._pump(to_server[0], writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    @contextmanager
    def running(self) -> Iterator["Gateway"]:
        """Its thread lives as long as the block."""
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            stop = asyncio.Event()
            thread = threading.Thread(target=runner.run, args=(stop.wait(),))
            thread.start()
            try:
                yield self
            finally:
                self.close_all()
                self._loop.call_soon_threadsafe(stop.set)
                thread.join(PATIENCE_S)


@dataclass
class Installation:
    """Daemons with TLS on both sides and tokens; all end with the block."""

    folder: Path
    gateway: Gateway
    port: int
    stack: ExitStack
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def issue(self, name: str) -> None:
        """Make an authority, a signing key beside the one before, and what they issue for every daemon."""
        self.address = self.gateway.open()
        ca, key, new = f"{self.folder / name}", f"{self.folder}/signing.pem", self.folder / name
        rotate = ("--rotate",) if Path(key).exists() else ()
        run_all(
            ("ca", "create", ca),
            ("ca", "issue", ca, "dataflow", "--ip", "127.0.0.1"),
            ("ca", "issue", ca, "client", "--client"),
            ("token", "keys", key, *rotate),
            ("token", "create", "--role", "operator", "--run", "*", "--key", key, "--out", f"{ca}/operator"),
            *(
                (
                    *("join-token", "--address", self.address, "--ca", f"{ca}/ca.pem", "--key", key),
                    *("--role", role, "--run", "quickstart", "--node", "*", "--out", f"{ca}/{role}"),
                )
                for role in ("trainer", "rollout")
            ),
        )
        self.put_in_force(self.folder / "signing.jwks.json")
        if rotate:  # no token is issued before every server knows its key, or a trainer ends
            says(self, "dataflow", "in-force/signing.jwks.json")
        self.put_in_force(*new.iterdir())

    def put_in_force(self, *files: Path) -> None:
        """Replace what the daemons read."""
        for file in files:
            replacing = self.in_force(f"{file.name}.new")
            shutil.copyfile(file, replacing)
            replacing.rename(self.in_force(file.name))

    def start(self, name: str, *command: str, **variables: Path | str) -> None:
        """Start a daemon of this installation."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("ASTRAFLOW_", "AWS_"))}
        paths = os.pathsep.join(filter(None, [*sys.path, str(ROOT / "tests" / "e2e" / "plugins")]))
        given = {n: str(v) for n, v in variables.items()}
        output = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--work-dir", str(self.folder / name), "--log-format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | given,
        )
        self.processes[name] = process
        self.stack.callback(end, process)

    def in_force(self, name: str) -> Path:
        """A file that the daemons read."""
        return self.folder / "in-force" / name

    def operate(self, *arguments: str) -> str:
        """Run a command of an operator by the files in force; what it prints."""
        how = {
            "--join": self.address,
            "--ca-file": self.in_force("ca.pem"),
            "--token-file": self.in_force("operator"),
            "--client-cert-file": self.in_force("client.pem"),
            "--client-key-file": self.in_force("client.key"),
        }
        ended = run(*arguments, *(str(word) for pair in how.items() for word in pair))
        assert ended.status == 0, ended.errors + self.logs()
        return ended.output

    def steps(self) -> int:
        """Finished steps, by the server."""
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} has ended: {self.logs()}"
        status: dict[str, Any] = json.loads(self.operate("status", "--json"))
        return max((int(policy["last_finished_step"]) for policy in status["policies"]), default=0)

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join((self.folder / f"{name}.log").read_text()[-3000:] for name in self.processes)


def run_all(*commands: tuple[str, ...]) -> None:
    """Run commands of ours, each of which succeeds."""
    for command in commands:
        ended = run(*command)
        assert ended.status == 0, ended.errors


def end(process: subprocess.Popen[bytes]) -> None:
    """End a daemon and what it started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    """A dataflow server, a run, its trainer and a node."""
    (tmp_path / "in-force").mkdir()
    with ExitStack() as stack:
        port = free_port()
        gateway = stack.enter_context(Gateway(port).running())
        redis = stack.enter_context(ValkeyServer(tmp_path))
        made = Installation(tmp_path, gateway, port, stack)
        made.issue("first")
        made.start(
            "dataflow",
            *("astraflow_dataflow", "--redis", redis.url, "--port", str(port)),
            ASTRAFLOW_TLS_CERT_FILE=made.in_force("dataflow.pem"),
            ASTRAFLOW_TLS_KEY_FILE=made.in_force("dataflow.key"),
            ASTRAFLOW_TLS_CLIENT_CA_FILE=made.in_force("ca.pem"),
            ASTRAFLOW_TOKEN_KEYS_FILE=made.in_force("signing.jwks.json"),
        )
        says(made, "dataflow", "dataflow.ready")
        store = f"file://{tmp_path}/store"
        made.operate(
            "runs", "create", "quickstart", "--store", store, *SMALL, *NOISY, "--set", "run.steps=200"
        )
        for name, module, join in (
            ("trainer", "astraflow_trainer", "trainer"),
            ("node", "astraflow_raas", "rollout"),
        ):
            made.start(
                name,
                module,
                ASTRAFLOW_JOIN_FILE=made.in_force(join),
                ASTRAFLOW_CLIENT_CERT_FILE=made.in_force("client.pem"),
                ASTRAFLOW_CLIENT_KEY_FILE=made.in_force("client.key"),
            )
        yield made


def says(installation: Installation, name: str, words: str) -> None:
    """Wait until a daemon's log has these words."""

    def said() -> bool:
        assert installation.processes[name].poll() is None, installation.logs()
        return words in (installation.folder / f"{name}.log").read_text()

    wait_for(said, what=f"{name} to say {words!r}", timeout_s=PATIENCE_S)


def test_training_continues_under_another_authority_and_at_another_address(
    installation: Installation,
) -> None:
    wait_for(lambda: installation.steps() >= STEPS_BEFORE, what="training", timeout_s=PATIENCE_S)
    installation.issue("second")
    installation.gateway.close_all(but_last=True)
    says(installation, "dataflow", "in-force/dataflow.pem")
    before = installation.steps()
    wait_for(lambda: installation.steps() >= before + STEPS_AFTER, what="more steps", timeout_s=PATIENCE_S)
    status: dict[str, Any] = json.loads(installation.operate("status", "--json"))
    assert status["trajectories"]["conservation_error"] == 0
