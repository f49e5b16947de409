"""The embedded server is real, durable by default, and found without configuration."""

import subprocess
from pathlib import Path

import pytest

from astraflow.errors import UnavailableError
from astraflow_kit.ports import free_port
from astraflow_launcher.run.embedded_redis import find_server, server_command, wait_until_answering


def test_the_bundled_server_starts_and_answers(tmp_path: Path) -> None:
    binary = find_server()
    assert binary is not None
    port = free_port()
    command = server_command(binary, port=port, folder=tmp_path)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_answering(port, timeout_s=100)
            assert (tmp_path / "appendonlydir").is_dir()
        finally:
            server.terminate()


def test_a_server_that_never_answers_is_reported() -> None:
    with pytest.raises(UnavailableError, match="did not answer PING"):
        wait_until_answering(free_port(), timeout_s=0.1)


def test_a_server_that_ends_again_and_again_is_reported_at_once() -> None:
    with pytest.raises(UnavailableError, match="ended 3 times as it started"):
        wait_until_answering(free_port(), timeout_s=100, ends=lambda: 3)


def test_the_command_keeps_data_and_never_evicts() -> None:
    command = " ".join(server_command(Path("valkey-server"), port=1, folder=Path("/data")))
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--bind 127.0.0.1" in command
