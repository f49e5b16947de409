"""Starts the embedded engine as a process on a free port, for tests that speak HTTP to it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow_kit.lifecycle import read_address_file
from support.development import wait_for

START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 20.0


@dataclass(frozen=True)
class EngineProcess:
    """A running engine. `log` is its standard error."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


def engine_command(model: Path, *options: str) -> list[str]:
    """The command line of an engine on a free loopback port."""
    base = ["-m", "astraflow_engine", "--model-path", str(model), "--port", "0", "--log-format", "json"]
    return [sys.executable, *base, *options]


@contextmanager
def running_engine(
    model: Path, *options: str, folder: Path, environment: dict[str, str] | None = None
) -> Iterator[EngineProcess]:
    """An engine serving `model`; terminated at the end, killed when that takes too long."""
    address_file, log = folder / "engine.json", folder / "engine.log"
    command = [*engine_command(model, *options), "--address-file", str(address_file)]
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, env=environment) as process:
        try:
            yield EngineProcess(f"http://{_address(address_file, process, log)}", process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(address_file: Path, process: "subprocess.Popen[bytes]", log: Path) -> str:
    begun = lambda: process.poll() is not None or read_address_file(address_file)  # noqa: E731
    wait_for(begun, what="the engine's start", timeout_s=START_DEADLINE_S, period_s=0.05)
    addresses = read_address_file(address_file)
    assert addresses is not None, f"the engine ended with {process.poll()}:\n{log.read_text()}"
    return addresses.http
