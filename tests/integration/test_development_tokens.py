"""`astraflow dev` on a machine with other users: who lacks the run's token cannot have code run by its server."""

import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.client import Client, RetryPolicy
from astraflow.commands.server import server_of_folder
from astraflow.connecting.connection import DialFiles
from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1.run_service_pb2 import CreateRunRequest
from astraflow.errors import UnauthenticatedError
from support.dataflow_world import bundle_of, recipe_text
from support.development import RunFiles, dev, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_only_the_owner_of_a_run_has_code_run_by_its_server(tmp_path: Path) -> None:
    files, marker = RunFiles(tmp_path), tmp_path / "ran"
    code = bundle_of(f"open({str(marker)!r}, 'w').close()")
    run = run_pb2.Run(run_id="evil", recipe_yaml=recipe_text(name="evil", dataset="recipe:Data"), code=code)
    with dev(tmp_path, "--without", "raas", "--without", "trainer"):
        wait_for(lambda: (files.addresses / "dataflow.json").exists(), what="the server's start")
        server = server_of_folder(files.data_dir)
        stranger = Client(server.address, retry=RetryPolicy(total_s=5.0))
        with stranger, pytest.raises(UnauthenticatedError):
            stranger.call(stranger.runs.CreateRun, CreateRunRequest(run=run))
        assert not marker.exists()
        assert server.connection(DialFiles()).current_token()
        wait_for(lambda: asked(files, "status").returncode == 0, what="the run of the launcher")
        for command in ("status", "why"):
            told = asked(files, command)
            assert (told.returncode, "run quickstart is active" in told.stdout) == (0, True), told.stderr


def asked(files: RunFiles, command: str) -> "subprocess.CompletedProcess[str]":
    """What the owner is told, whose token is in the run's folder."""
    words = [sys.executable, "-m", "astraflow.cli", command, "--data-dir", str(files.data_dir)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
