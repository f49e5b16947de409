"""Which server a command asks, and what is said when there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grpc import RpcError

from astraflow.commands.server import Server, ServerOptions, find_server
from astraflow.connecting.compatibility import CONTRACT_VERSION
from astraflow.connecting.connection import DialFiles
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import IncompatibleError, InvalidArgumentError, NotFoundError, UnavailableError
from astraflow.server.v1.server_info_pb2 import ServerInfo
from support.scripted_batches import ScriptedBatches, serving


def publish(folder: Path, *, port: int = 1, pid: int = os.getpid()) -> None:
    """What a run's server leaves in its folder; one with a higher port left it later."""
    path = folder / "addresses" / "dataflow.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"pid": pid, "grpc": f"127.0.0.1:{port}", "http": ""}))
    os.utime(path, (port, port))


@pytest.fixture
def ended_pid() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_the_named_server_wins_over_any_folder(tmp_path: Path) -> None:
    publish(tmp_path / "a")
    assert find_server(Server("host:7", "--join"), data_dir=None, runs=tmp_path) == Server("host:7", "--join")


def test_the_newest_folder_whose_server_lives_is_asked(tmp_path: Path, ended_pid: int) -> None:
    publish(tmp_path / "a")
    publish(tmp_path / "b", port=2)
    publish(tmp_path / "c", port=3, pid=ended_pid)
    (tmp_path / "d").mkdir()
    found = find_server(None, data_dir=None, runs=tmp_path)
    assert found == Server("127.0.0.1:2", f"run folder {tmp_path / 'b'}")


def test_a_named_folder_is_asked_whatever_else_runs(tmp_path: Path) -> None:
    publish(tmp_path / "a")
    publish(tmp_path / "b", port=2)
    assert find_server(None, data_dir=tmp_path / "a", runs=tmp_path).address == "127.0.0.1:1"


def test_a_folder_brings_the_token_that_its_server_takes(tmp_path: Path) -> None:
    publish(tmp_path / "a")
    (tmp_path / "a" / "secrets").mkdir()
    (tmp_path / "a" / "secrets" / "operator.token").write_text("own\n")
    (tmp_path / "other").write_text("of another server")
    for found in (
        find_server(None, data_dir=tmp_path / "a"),
        find_server(None, data_dir=None, runs=tmp_path),
    ):
        assert found.connection(DialFiles(token_file=tmp_path / "other")).current_token() == "own"


def test_without_any_run_the_ways_to_name_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"--join HOST:PORT, set ASTRAFLOW_JOIN.*astraflow dev"):
        find_server(None, data_dir=None, runs=tmp_path)
    with pytest.raises(NotFoundError, match=r"dataflow\.json does not exist"):
        find_server(None, data_dir=tmp_path, runs=tmp_path)


def test_a_run_that_has_ended_is_told_and_where_its_traces_are(tmp_path: Path, ended_pid: int) -> None:
    publish(tmp_path / "a", port=1, pid=ended_pid)
    told = rf"has ended.*{ended_pid}.*support-bundle --data-dir"
    with pytest.raises(UnavailableError, match=told) as error:
        find_server(None, data_dir=None, runs=tmp_path)
    assert str(tmp_path / "a") in error.value.message


def test_a_server_that_does_not_answer_is_named_with_how_it_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path / "a")
    with (
        pytest.raises(UnavailableError, match=r"no dataflow server answers at 127\.0\.0\.1:1 \(run folder"),
        ServerOptions(data_dir=tmp_path / "a").client() as client,
    ):
        client.call(client.admin.Status, pb.StatusRequest(), timeout_s=1.0)
    assert capsys.readouterr().err == f"asking 127.0.0.1:1 (run folder {tmp_path / 'a'})\n"


def test_a_store_that_does_not_answer_is_not_taken_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.client.Client.server_info", lambda _self: None)
    with (
        pytest.raises(UnavailableError, match=r"^the store is away$"),
        ServerOptions(join=Server("127.0.0.1:1", "--join")).client(),
    ):
        raise UnavailableError("the store is away")


def test_a_server_that_says_what_it_lacks_need_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.client.Client.server_info", lambda _self: None)
    with (
        pytest.raises(UnavailableError, match=r"^Redis gave no answer$"),
        ServerOptions(join=Server("127.0.0.1:1", "--join")).client(),
    ):
        raise UnavailableError("Redis gave no answer", retry_after_s=0.2) from RpcError()


def test_a_server_of_another_contract_version_is_told_before_anything_is_asked_of_it() -> None:
    later = CONTRACT_VERSION + 1
    info = ServerInfo(product_version="7.0.0", contract_version=later, oldest_contract_version=later)
    refusal = r"astraflow 7\.0\.0\) speaks contract version .* update the client"
    with (
        serving(ScriptedBatches(info=info)) as client,
        pytest.raises(IncompatibleError, match=refusal),
        ServerOptions(join=Server(client.address, "--join")).client(),
    ):
        pytest.fail("the command must not begin")


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidArgumentError, match=r"token file .*token cannot be read"),
        ServerOptions(join=Server("127.0.0.1:1", "--join"), token_file=tmp_path / "token").client(),
    ):
        pass
