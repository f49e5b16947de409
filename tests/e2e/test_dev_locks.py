"""Two launches never share a data dir, and a trainer started by hand never shares a trainer's work folder."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow_kit.lifecycle import ExitCode
from support.audit import audit
from support.development import RunFiles, dev, finish, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_second_launch_over_one_data_dir_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    with dev(tmp_path, "--steps", "1000") as first:
        wait_for(lambda: files.steps_done() >= 1)
        before = files.starts()
        with dev(tmp_path, "--steps", "1000") as second:
            assert second.wait(120) == ExitCode.SUPERSEDED
        said = files.stderr.read_text()
        assert f"in use by process {first.pid} (" in said
        assert "--data-dir" in said
        (trainer,) = files.processes("-m astraflow_trainer")
        work_dir = files.data_dir / "work" / "trainer-solver"
        command = ["astraflow_trainer", "--join", "127.0.0.1:1", "--work-dir", str(work_dir)]
        beside = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, timeout=150, check=False
        )
        assert beside.returncode == ExitCode.SUPERSEDED
        assert f"in use by process {trainer.pid} (" in beside.stderr
        first.send_signal(signal.SIGINT)
        summary = finish(first, tmp_path)
    assert files.starts() == before
    assert summary["steps"] >= 1
    assert summary["conservation_error"] == 0
    assert audit(tmp_path).violations == []


@pytest.mark.soak  # in ci tests/chaos/test_kills.py starts again over the folder of a launcher that it killed
def test_the_data_dir_of_a_killed_launch_is_free_at_once(tmp_path: Path) -> None:
    with dev(tmp_path, "--steps", "1000") as first:
        wait_for(lambda: RunFiles(tmp_path).steps_done() >= 2)
        first.kill()
        first.wait()
    with dev(tmp_path, "--steps", "4") as second:
        assert finish(second, tmp_path)["steps"] >= 4
    assert audit(tmp_path).violations == []
