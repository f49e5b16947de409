"""The authority of an installation is replaced while a run trains: no daemon of the run is started anew."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.cli import run
from support.dataflow_process import DataflowProcess
from support.development import NOISY, ROOT, SMALL, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(400)]

STEPS, REPLACED_AFTER = 8, 1


@dataclass
class Installation:
    """One server, a trainer and a node, all with files of one authority, that know each other by certificate and token.

    Files have the same names under every authority, as mounted secrets do.
    """

    folder: Path
    server: DataflowProcess

    def issue(self, authority: str) -> None:
        """Write all files of a new authority and a new signing key, and put them in place: those who dial first, so
        that nothing but what they had works until the server has changed.
        """
        folder = self.folder / authority
        ca, key, address = folder / "ca", folder / "signing.pem", ("--address", self.server.address)
        self._do("ca", "create", str(ca))
        self._do("ca", "issue", str(ca), "server", "--ip", "127.0.0.1")
        self._do("ca", "issue", str(ca), "client", "--client")
        self._do("token", "keys", str(key))
        for role in ("operator", "trainer", "rollout"):
            of = ("--role", role, "--run", "*", "--key", str(key))
            self._do("join-token", *address, "--ca", f"{ca}/ca.pem", *of, "--out", f"{folder}/{role}.join")
        names = {f"{role}.join": folder / f"{role}.join" for role in ("operator", "trainer", "rollout")}
        names |= {
            name: ca / name for name in ("client.pem", "client.key", "server.pem", "server.key", "ca.pem")
        }
        for name, source in {**names, "signing.jwks.json": folder / "signing.jwks.json"}.items():
            (self.folder / f"{name}.new").write_bytes(source.read_bytes())
            (self.folder / f"{name}.new").replace(self.folder / name)

    def start_server(self) -> None:
        """Start it; again, where it has ended."""
        named = {
            "--tls-cert-file": "server.pem",
            "--tls-key-file": "server.key",
            "--tls-client-ca-file": "ca.pem",
            "--token-keys-file": "signing.jwks.json",
        }
        files = [part for option, name in named.items() for part in (option, str(self.folder / name))]
        self.server.start(options=files)

    def operate(self, *arguments: str) -> str:
        """Run a command of an operator; what it prints."""
        return self._do(*arguments, *self._dialling("operator"))

    def command(self, module: str, role: str) -> list[str]:
        """How a daemon of the run is started."""
        return [sys.executable, "-m", module, *self._dialling(role), "--work-dir", str(self.folder / role)]

    def _dialling(self, role: str) -> list[str]:
        files = {"join": f"{role}.join", "client-cert": "client.pem", "client-key": "client.key"}
        return [part for name, file in files.items() for part in (f"--{name}-file", str(self.folder / file))]

    @staticmethod
    def _do(*arguments: str) -> str:
        ended = run(*arguments)
        assert ended.status == 0, ended.errors
        return ended.output


@pytest.fixture
def installation(process: DataflowProcess, tmp_path: Path) -> Installation:
    return Installation(tmp_path, process)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts programs that end with the test."""
    plugins = [*sys.path, str(ROOT / "tests" / "e2e" / "plugins")]
    variables = {n: v for n, v in os.environ.items() if not n.startswith(("ASTRAFLOW_", "AWS_"))}
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, plugins)), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
            stack.callback(process.wait, 20)
            stack.callback(process.kill)
            return process

        yield started


def test_a_run_trains_on_while_authority_certificates_keys_and_join_strings_are_replaced(
    installation: Installation, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    installation.issue("first")
    installation.start_server()
    small = [*SMALL, *NOISY, "--set", f"run.steps={STEPS}"]
    installation.operate("runs", "create", "quickstart", "--store", f"file://{tmp_path}/weights", *small)
    daemons = {
        name: start(installation.command(f"astraflow_{module}", role), tmp_path / f"{name}.log")
        for name, module, role in (("trainer", "trainer", "trainer"), ("node", "raas", "rollout"))
    }

    def status() -> Any:
        for name, daemon in daemons.items():
            assert daemon.poll() is None, (tmp_path / f"{name}.log").read_text()[-3000:]
        return json.loads(installation.operate("status", "--json"))

    def trained() -> bool:
        return bool(status()["policies"][0]["last_finished_step"] >= REPLACED_AFTER)

    wait_for(trained, what=f"step {REPLACED_AFTER}", timeout_s=180)
    installation.issue("second")
    # A new process knows the second authority alone, and ends every connection that the first one made.
    assert status()["policies"][0]["last_finished_step"] < STEPS
    installation.server.kill()
    installation.start_server()
    assert "run quickstart is finished" in installation.operate("runs", "wait", "quickstart")
    found = json.loads(installation.operate("status", "--json"))
    assert found["policies"][0]["last_finished_step"] == STEPS
    assert found["trajectories"]["conservation_error"] == 0
    assert found["nodes"][0]["restarts"] == 0
