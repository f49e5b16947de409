"""The embedded server is real, durable by default, and found without configuration."""

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from astraflow.errors import UnavailableError
from astraflow_kit.ports import free_port
from astraflow_launcher.run.embedded_redis import find_server, server_command, wait_until_answering


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Its port, and the folder of its data."""
    binary, port, folder = find_server(), free_port(), tmp_path / "redis"
    assert binary is not None
    folder.mkdir()
    command = server_command(binary, port=port, folder=folder)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield port, folder
        process.terminate()


def test_the_bundled_server_starts_and_answers(server: tuple[int, Path]) -> None:
    port, folder = server
    wait_until_answering(port, folder=folder, timeout_s=100)
    assert (folder / "appendonlydir").is_dir()


def test_another_server_on_the_port_is_not_taken_for_ours(server: tuple[int, Path], tmp_path: Path) -> None:
    port, folder = server
    wait_until_answering(port, folder=folder, timeout_s=100)
    with pytest.raises(UnavailableError, match=f"taken by another Redis, which keeps its data in {folder}"):
        wait_until_answering(port, folder=tmp_path, timeout_s=100)


def test_a_server_that_never_answers_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="did not answer PING"):
        wait_until_answering(free_port(), folder=tmp_path, timeout_s=0.1)


def test_a_server_that_ends_while_it_answers_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer_in_part() -> None:
            with listener.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(b"+PONG\r\n*2\r\n$3\r\ndir\r\n")

        with ThreadPoolExecutor() as pool:
            answering = pool.submit(answer_in_part)
            with pytest.raises(UnavailableError, match="ended 3 times"):
                wait_until_answering(port, folder=tmp_path, timeout_s=100, ends=lambda: 3)
            answering.result()


def test_a_server_that_ends_again_and_again_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="ended 3 times as it started"):
        wait_until_answering(free_port(), folder=tmp_path, timeout_s=100, ends=lambda: 3)


def test_the_command_keeps_data_and_never_evicts() -> None:
    command = " ".join(server_command(Path("valkey-server"), port=1, folder=Path("/data")))
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--auto-aof-rewrite-percentage 100 --auto-aof-rewrite-min-size 8mb" in command
    assert "--bind 127.0.0.1" in command
