"""The dataflow server as people and supervisors meet it: options, check, addresses, pages, signals."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.errors import PluginError
from astraflow_kit.lifecycle import Addresses, ExitCode, read_address_file
from support.dataflow_process import DataflowProcess
from support.dataflow_world import bundle_of, recipe_text, served

MODULE = [sys.executable, "-m", "astraflow_dataflow"]


def finished(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of the command to its end."""
    return subprocess.run([*MODULE, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def serving(process: DataflowProcess) -> DataflowProcess:
    """A server process."""
    process.start()
    return process


def addresses(process: DataflowProcess) -> Addresses:
    """Where it listens."""
    found = read_address_file(process.folder / "address.json")
    assert found is not None
    return found


def page(process: DataflowProcess, path: str) -> str:
    """A page of the server."""
    with urllib.request.urlopen(f"http://{addresses(process).http}{path}", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def test_help_names_the_remedy_for_each_exit_code() -> None:
    text = finished("--help").stdout
    for word in ("--redis", "--allow-recipe-code", "Status 2", "75", "Example"):
        assert word in text


def test_check_reports_a_usable_redis_and_starts_nothing(redis_url: str) -> None:
    result = finished("--redis", redis_url, "--check")
    assert result.returncode == 0, result.stderr
    assert "redis: usable" in result.stdout


async def test_pages_show_what_the_contract_says(serving: DataflowProcess) -> None:
    async with serving.world() as world:
        await world.create_run()
        await world.trainer()
        answer = await world.status()
    shown = json.loads(page(serving, "/status"))
    assert shown["pid"] == addresses(serving).pid
    assert shown["runs"]["run"]["trajectories"]["conservation_error"] == "0"
    assert [item["policy_id"] for item in shown["runs"]["run"]["policies"]] == [answer.policies[0].policy_id]
    assert page(serving, "/healthz") == "ok\n"
    assert json.loads(page(serving, "/readyz"))["ready"] is True
    metrics = page(serving, "/metrics")
    assert 'astraflow_dataflow_conservation_error{run="run"} 0.0' in metrics
    assert 'astraflow_dataflow_version{policy="solver",run="run"} 0.0' in metrics


def test_sigterm_ends_the_server_with_status_zero(serving: DataflowProcess) -> None:
    assert serving.signal(signal.SIGTERM) == ExitCode.OK


async def test_a_run_with_code_of_its_own_needs_leave(redis_url: str, tmp_path: Path) -> None:
    source = """
class Data:
    def __init__(self, seed): pass
    def train(self, index): return None
    def heldout(self, index): return None
"""
    run = run_pb2.Run(run_id="own", recipe_yaml=recipe_text(dataset="recipe:Data"), code=bundle_of(source))
    async with served(redis_url, tmp_path) as world:
        with pytest.raises(PluginError, match="--allow-recipe-code"):
            await world.ask(run_service_pb2.CreateRunResponse, run=run)
    async with served(redis_url, tmp_path, allow_recipe_code=True) as world:
        assert (await world.ask(run_service_pb2.CreateRunResponse, run=run)).run.run_id == "own"
    # A server that may not run the code still answers for what it can and says why it cannot for the rest.
    async with served(redis_url, tmp_path) as world:
        world.run_id = "own"
        with pytest.raises(PluginError, match="--allow-recipe-code"):
            await world.status()
