"""What `astraflow dev` survives: swaps in the middle of a generation, killed daemons, and its own death.

The matrix of kills inside named windows is in tests/chaos.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from astraflow_kit.lifecycle import ExitCode
from astraflow_trainer.model.tokenizer import TokenizerSettings, train_tokenizer
from support.audit import audit
from support.development import ROOT, RUN_ID, RunFiles, dev, finish, wait_for
from support.tiny_models import TinyShape, save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def most_spans(files: RunFiles) -> int:
    """How many versions sampled one trajectory that was trained on, at most."""
    steps = files.read_metrics("step")
    return max((line["num_version_spans_max"] for line in steps if not line["skipped"]), default=0)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFiles, dict[str, Any]]:
    """A run with a slow engine, and its summary: ended by Ctrl-C once weights were swapped within a generation."""
    files = RunFiles(tmp_path_factory.mktemp("interrupted"))
    with dev(files.folder, "--steps", "1000", failpoints="engine.decode_step=sleep:0.05") as launcher:
        wait_for(lambda: most_spans(files) >= 2 or launcher.poll() is not None, what="a swap in a generation")
        launcher.send_signal(signal.SIGINT)
        return files, finish(launcher, files.folder)


def test_weights_swapped_in_the_middle_of_a_generation_leave_two_spans_in_a_trained_trajectory(
    interrupted: tuple[RunFiles, dict[str, Any]],
) -> None:
    files, _ = interrupted
    assert {hit.name for hit in files.read_hits()} == {"engine.decode_step"}
    assert most_spans(files) >= 2


def test_ctrl_c_finishes_the_run_in_order(interrupted: tuple[RunFiles, dict[str, Any]]) -> None:
    _, summary = interrupted
    assert summary["steps"] >= 1
    assert summary["heldout_n"] == 8
    assert summary["conservation_error"] == 0


def node_of_the_same_name(files: RunFiles) -> "subprocess.Popen[bytes]":
    """A process that joins the run as the launch's own node, from another folder; it writes to `second`."""
    server = json.loads((files.addresses / "dataflow.json").read_text())["grpc"]
    token = str(files.data_dir / "secrets" / "rollout.token")
    named = ("--run-id", RUN_ID, "--node-id", "node-1", "--token-file", token)
    elsewhere = ("--work-dir", str(files.folder / "elsewhere"), "--allow-recipe-code")
    command = (sys.executable, "-m", "astraflow_raas", "--join", server, *named, *elsewhere)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "e2e" / "plugins")}
    with (files.folder / "second").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def test_a_second_node_of_one_name_is_refused_and_the_launch_goes_on(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    with dev(tmp_path, "--steps", "1000") as launcher:
        wait_for(lambda: files.steps_done() >= 1)
        with node_of_the_same_name(files) as second:
            assert second.wait(timeout=120) == ExitCode.USAGE, (tmp_path / "second").read_text()
        assert "choose another --node-id" in (tmp_path / "second").read_text()
        before = files.steps_done()
        wait_for(lambda: files.steps_done() > before + 1)
        launcher.send_signal(signal.SIGINT)
        summary = finish(launcher, tmp_path)
    assert summary["conservation_error"] == 0
    assert [child for child, _ in files.starts()].count("node-1") == 1


def test_a_node_whose_name_was_taken_while_it_stood_still_comes_back_and_the_launch_goes_on(
    tmp_path: Path,
) -> None:
    files = RunFiles(tmp_path)
    with dev(tmp_path, "--steps", "1000") as launcher:
        wait_for(lambda: files.steps_done() >= 1)
        [first] = [each for each in files.processes("-m astraflow_raas") if "family" not in each.cmdline()]
        first.suspend()
        with node_of_the_same_name(files) as second:
            wait_for(lambda: "run.joined" in (tmp_path / "second").read_text(), what="the second node's turn")
            first.resume()
            wait_for(
                lambda: [child for child, _ in files.starts()].count("node-1") == 2, what="another start"
            )
            second.kill()
        before = files.steps_done()
        wait_for(lambda: files.steps_done() > before + 1)
        launcher.send_signal(signal.SIGINT)
        summary = finish(launcher, tmp_path)
    assert summary["conservation_error"] == 0


@pytest.mark.soak  # in ci tests/chaos/test_kills.py kills every daemon, and waits for the others
@pytest.mark.parametrize("module", ["astraflow_dataflow", "astraflow_trainer"])
def test_a_killed_daemon_is_restarted_and_the_run_goes_on(tmp_path: Path, module: str) -> None:
    files = RunFiles(tmp_path)
    with dev(tmp_path, "--steps", "8") as launcher:
        wait_for(lambda: files.steps_done() >= 3)
        for process in files.processes(f"-m {module}"):
            process.send_signal(signal.SIGKILL)
        summary = finish(launcher, tmp_path)
    assert summary["steps"] == 8
    assert summary["conservation_error"] == 0
    assert audit(tmp_path).violations == []


@pytest.mark.soak  # in ci tests/chaos/test_kills.py kills a launcher, and waits for the end of all that it started
def test_everything_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    with dev(tmp_path, "--steps", "1000") as launcher:
        wait_for(lambda: RunFiles(tmp_path).steps_done() >= 1)
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert len(children) >= 5  # Redis, dataflow, trainer, node, engine
        launcher.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


def test_a_run_without_a_node_says_what_it_waits_for_and_a_second_ctrl_c_ends_it_at_once(
    tmp_path: Path,
) -> None:
    files = RunFiles(tmp_path)
    with dev(tmp_path, "--steps", "1000", "--without", "raas") as launcher:
        wait_for(lambda: "no_node" in files.stderr.read_text(), what="the line that says so")
        children = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(signal.SIGINT)
        wait_for(lambda: "finishing the step" in files.stderr.read_text())
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    said = files.stderr.read_text()
    assert f"--data-dir {files.data_dir}" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_a_model_that_the_engine_cannot_serve_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["1 + 2 = 3"], settings=TokenizerSettings(vocab_size=300))
    model = save_tiny_model(
        tmp_path / "model",
        shape=TinyShape(model_type="mistral", vocab_size=len(tokenizer), max_positions=256),
    )
    tokenizer.save_pretrained(model)
    solver = "policies.solver.model"
    sources = (f"{solver}.path={model}", f"{solver}.architecture=null", f"{solver}.tokenizer=null")
    options = [word for value in (*sources, f"{solver}.warm_start=null") for word in ("--set", value)]
    with dev(tmp_path, *options) as launcher:
        assert launcher.wait(timeout=120) == 2
    said = RunFiles(tmp_path).stderr.read_text()
    assert "model_type is 'mistral'" in said
    assert "--engine sglang" in said
