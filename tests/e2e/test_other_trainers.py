"""Trainers that are not ours, against the same server, nodes and store: plain torch, and transformers' `Trainer`."""

import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from astraflow.client import Client, Connection, RetryPolicy
from astraflow.dataflow.v1.run_service_pb2 import GetRunRequest
from astraflow.errors import AstraflowError
from astraflow.recipe.file import load_recipe
from astraflow_kit.plugins import RecipeSource
from astraflow_kit.ports import free_port
from astraflow_launcher.run.run_tokens import RunTokens
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.warm_start.starting_model import starting_model
from astraflow_weights.store import open_store
from support.code_size import code_lines_of
from support.development import ROOT, SMALL, RunFiles, dev, finish, wait_for
from support.published_models import read_log

EXAMPLES = ROOT / "clients" / "python" / "examples"
RECIPE = ROOT / "recipes" / "quickstart"
STEPS = 3
AS_SHIPPED = (
    "raas.reward=recipe:BoxedSum",
    "policies.solver.model.warm_start.steps=600",
    "dataflow.groups_per_step=16",
    "dataflow.group_size=8",
    "dataflow.evaluation.num_samples=256",
    "dataflow.evaluation.final_samples=1024",
)
"""What `support.development` makes small, as the recipe has it."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def first_model(folder: Path, *overrides: str) -> Path:
    """The model that the quickstart starts from, as our trainer makes it."""
    loaded = load_recipe(RECIPE, overrides=overrides)
    source = RecipeSource(text=loaded.yaml_text, folder=RECIPE)
    joined = JoinedRun("quickstart", loaded.recipe, "solver", "", source)
    return starting_model(joined, cache=folder / "cache", threads=1, progress=lambda _: None)


def has_run(address: str, token: Path) -> bool:
    """Whether the server answers, and has been told of the run."""
    try:
        with Client(Connection(address, token=token), retry=RetryPolicy(total_s=0)) as client:
            client.call(client.runs.GetRun, GetRunRequest(), timeout_s=2)
    except (AstraflowError, OSError):
        return False
    return True


def trained(folder: Path, example: str, model: Path, *arguments: str) -> tuple[dict[str, Any], RunFiles]:
    """The summary of a whole run whose trainer is the example, and where it lies."""
    files, port = RunFiles(folder), free_port()
    with dev(folder, "--without", "trainer", "--port", str(port), *arguments) as launcher:
        token = RunTokens(files.data_dir).of("trainer")

        def answers() -> bool:
            assert launcher.poll() is None, files.stderr.read_text()
            return has_run(f"127.0.0.1:{port}", token)

        wait_for(answers, what="the run")
        command = [sys.executable, str(EXAMPLES / example), f"127.0.0.1:{port}", str(token), str(model)]
        subprocess.run([*command, str(folder / "work")], check=True, timeout=1500)
        return finish(launcher, folder), files


@pytest.mark.ci
@pytest.mark.parametrize("example", ["plain_trainer.py", "hf_trainer.py"])
def test_a_trainer_of_a_few_lines_claims_acks_and_publishes_what_nodes_serve(
    tmp_path: Path, example: str
) -> None:
    model = first_model(tmp_path, *[value for value in SMALL if value != "--set"])
    summary, files = trained(tmp_path, example, model, "--set", f"run.steps={STEPS}")
    log = read_log(open_store(f"file://{files.data_dir}/store"), "solver", run_id="quickstart")
    assert [record.step for record in log.records] == list(range(STEPS + 1))
    assert summary["steps_by_policy"] == {"solver": STEPS}, "every step was acked and is durable"
    counted = summary["trajectories"]
    assert (counted["trained"], counted["conservation_error"]) == (STEPS * 8, 0)
    assert summary["density_mean"] > 0, "weights moved"
    assert summary["learned_nothing"] is None
    assert "weights.activated" in (files.data_dir / "logs" / "node-1.log").read_text()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("example", ["plain_trainer.py", "hf_trainer.py"])
def test_the_quickstart_is_learned_and_its_control_is_not(tmp_path: Path, example: str) -> None:
    model, gains = first_model(tmp_path), {}
    for rate in (5e-4, 0.0):
        folder = tmp_path / f"rate-{rate}"
        folder.mkdir()
        overrides = [*AS_SHIPPED, f"trainer.optimizer.learning_rate={rate}"]
        settings = chain.from_iterable(("--set", override) for override in overrides)
        summary, _ = trained(folder, example, model, *settings)
        gains[rate] = summary["heldout_last"] - summary["heldout_first"]
    # 256 and 1024 samples: the error of a difference is 0.035 at most.
    assert gains[5e-4] > 0.15
    assert abs(gains[0.0]) < 0.12


def test_the_plain_trainer_is_short() -> None:
    assert code_lines_of((EXAMPLES / "plain_trainer.py").read_text()) <= 60
