"""`astraflow eval` makes a run of no steps, prints its scores, and says by its status whether they are whole."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

from astraflow.dataflow.v1 import admin_service_pb2, evaluation_service_pb2
from astraflow_launcher.commands import eval as eval_command
from astraflow_launcher.commands import local_run
from astraflow_launcher.run.development_run import Options
from astraflow_launcher.run.folder import RunFolder
from astraflow_launcher.view.live import View
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.summary import Summary, summarize
from support import cli
from support.cli import Ended
from support.recipes import TINY

Run = Callable[..., Ended]
CODE = """
from astraflow.plugins import Message, TaskSpec

class Data:
    num_heldout = 1

    def __init__(self, seed):
        pass

    def train(self, index):
        return None

    def heldout(self, index):
        prompt = Message(role="user", content="?")
        return TaskSpec(task_id=f"t{index}", messages=(prompt,), data={}) if index < self.num_heldout else None

class Empty(Data):
    num_heldout = 0

class Reward:
    def __call__(self, task, completion):
        return 0.0
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `astraflow eval ../recipe ARGUMENTS` in an empty folder."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "recipe.yaml").write_text(TINY)
    (tmp_path / "recipe" / "recipe.py").write_text(CODE)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(local_run, "configure", _close)
    return partial(cli.run, "eval", "../recipe")


def _close(role: str, *, log_format: str, stream: TextIO) -> None:
    """In place of the process's logging, which belongs to the tests."""
    del role, log_format
    stream.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options of runs that would have started. Of two tasks with two samples each three have a result, or all
    where `--tasks` asks for one task.
    """
    seen: list[Options] = []

    class EndedRun:
        def __init__(self, options: Options, folder: RunFolder, view: View) -> None:
            del view
            self._root = folder.root
            seen.append(options)

        async def run(self) -> Summary:
            planned = 2 * seen[-1].loaded.recipe.dataflow.evaluation.final_samples
            passed = [evaluation_service_pb2.PassAtK(k=k, value=k / 2, num_tasks=1) for k in (1, 2)]
            facts: dict[str, Any] = {"num_tasks": 2, "mean_reward": 0.5, "avg_at_k": 0.25}
            found = evaluation_service_pb2.GetEvaluationResponse(
                evaluations=[
                    admin_service_pb2.Evaluation(
                        policy_id="solver",
                        num_samples=min(3, planned),
                        num_planned=planned,
                        samples_per_task=2,
                        complete=True,
                    )
                ],
                scores=[
                    evaluation_service_pb2.Score(
                        policy_id="solver",
                        source=source,
                        num_samples=3,
                        pass_at_k=passed,
                        truncated_fraction=0.125,
                        **facts,
                    )
                    for source in ("", "hard")
                ],
            )
            measured: dict[str, Any] = {
                "wall_s": 1.0,
                "peak_pss_bytes": 0,
                "data_dir": str(self._root),
            }
            return summarize(Observation(last_evaluation=found), goal_met=None, **measured)

    monkeypatch.setattr(local_run, "DevelopmentRun", EndedRun)
    return seen


def test_options_are_a_run_of_no_steps(run: Run, started: list[Options]) -> None:
    run("--tasks", "5", "--samples", "3", "--seed", "7", "--nodes", "2", "--timeout", "60")
    (options,) = started
    recipe = options.loaded.recipe
    assert (recipe.run.steps, recipe.run.seed, recipe.policy("solver").steps) == (0, 7, 0)
    evaluation = recipe.dataflow.evaluation
    assert (evaluation.final_samples, evaluation.samples_per_task) == (5, 3)
    assert (options.num_nodes, options.timeout_s) == (2, 60)


def test_scores_are_a_table_on_stdout_by_source(run: Run, started: list[Options]) -> None:
    header, *rows = run("--tasks", "1").output.splitlines()
    assert header.split() == [
        *("policy", "source", "tasks", "n", "score", "avg@2", "pass@1", "pass@2", "truncated")
    ]
    assert [row.split() for row in rows] == [
        ["solver", source, "2", "3", "0.500", "0.250", "0.500", "1.000", "12.5%"]
        for source in ("all", "hard")
    ]
    assert len(started) == 1


def test_the_end_says_what_was_scored_and_where_each_sample_is(run: Run, started: list[Options]) -> None:
    told = run("--tasks", "1", "--data-dir", "data").errors
    assert "solver: some/model" in told
    assert f"each sample: {Path('data').resolve() / 'samples.jsonl'}" in told
    assert "each sample" not in run("--tasks", "1", "--quiet").errors


def test_json_is_one_object_that_stays_in_the_folder(run: Run, started: list[Options]) -> None:
    ended = run("--json", "--tasks", "1", "--data-dir", "data")
    assert (ended.status, ended.json["complete"]) == (0, True)
    assert ended.json["samples"] == {"planned": 2, "results": 2, "per_task": 2}
    assert [score["source"] for score in ended.json["scores"]] == ["", "hard"]
    assert ended.json["weights"] == {"solver": {"path": "some/model"}}
    assert Path("data/summary.json").read_text() == ended.output
    assert ended.json["data_dir"] == str(Path("data").resolve())


def test_samples_without_a_result_are_status_1_and_said(run: Run, started: list[Options]) -> None:
    ended = run("--tasks", "2")
    assert ended.status == 1
    assert "3 of 4 samples have a result; go on with --data-dir" in ended.errors
    assert len(started) == 1


def test_a_stopped_evaluation_says_why_and_not_to_go_on(
    run: Run, started: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "tasks failed alike 100 times in a row: KeyError (recipe.py:3); correct it and start a new run"
    whole = eval_command.conduct

    def conduct(*given: Any, **named: Any) -> Summary:
        return replace(whole(*given, **named), stopped_for=why)

    monkeypatch.setattr(eval_command, "conduct", conduct)
    ended = run("--tasks", "2")
    assert (ended.status, len(started)) == (1, 1)
    assert f"the run was stopped: {why}" in ended.errors
    assert "go on with" not in ended.errors


def test_a_data_set_without_held_out_tasks_is_refused_before_anything_is_made(
    run: Run, started: list[Options]
) -> None:
    refused = run("--set", "run.dataset=recipe:Empty")
    assert refused.status == 2
    assert "recipe:Empty: the data set has no held-out task" in refused.errors
    assert (started, list(Path().iterdir())) == ([], [])


def test_weights_that_are_not_there_are_refused_before_anything_is_made(
    run: Run, started: list[Options]
) -> None:
    refused = run("--weights", "nowhere")
    assert refused.status == 2
    assert "--weights nowhere: neither a model" in refused.errors
    assert (started, list(Path().iterdir())) == ([], [])


def test_the_option_of_a_wrong_value_is_named(run: Run, started: list[Options]) -> None:
    refused = run("--samples", "2000")
    assert refused.status == 2
    assert "--samples 2000: dataflow.evaluation.samples_per_task" in refused.errors
    assert started == []


def test_the_folder_of_an_evaluation_is_no_training_run(run: Run, started: list[Options]) -> None:
    assert run("--data-dir", "data", "--tasks", "1").status == 0
    refused = cli.run("dev", "../recipe", "--data-dir", "data", "--steps", "5")
    assert "holds run 'tiny' of another recipe" in refused.errors
    assert len(started) == 1
