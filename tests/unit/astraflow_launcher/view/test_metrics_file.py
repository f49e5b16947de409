"""`metrics.jsonl` holds every step, version and complete evaluation once, with what joins it to the logs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import version_pb2
from astraflow_launcher.view.metrics_file import MetricsFile, to_json
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.totals import StepPoint
from support.observations import evaluation, observed


def _evaluation(version: int, reward: float, **fields: bool) -> admin.Evaluation:
    return evaluation(version, reward, num_samples=8, **fields)


def _observation(*evaluations: admin.Evaluation) -> Observation:
    return observed(*evaluations, seconds=7.5)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the lines go."""
    return tmp_path / "metrics.jsonl"


STEP = StepPoint("solver", 1, 2.5, {"reward_mean": 0.5, "loss": -0.25})
STEP_LINE = {"step": 1, "seconds": 2.5, "reward_mean": 0.5, "loss": -0.25}
VERSION = version_pb2.Version(version=4, step=3, delta_bytes=64, snapshot_bytes=0, density=0.125)
VERSION_LINE = {"version": 4, "step": 3, "delta_bytes": 64, "snapshot_bytes": 0, "density": 0.125}
EVALUATED = {"evaluation": "", "heldout_reward": 0.5, "heldout_roles": {}, "heldout_metrics": {}}
EVALUATION_LINE = {"version": 0, "seconds": 7.5, **EVALUATED, "num_samples": 8, "final": False}


@pytest.mark.parametrize(
    ("kind", "line", "observed"),
    [
        ("step", STEP_LINE, Observation(steps=[STEP])),
        ("version", VERSION_LINE, Observation(versions={"solver": [VERSION]})),
        ("evaluation", EVALUATION_LINE, _observation(_evaluation(0, 0.5))),
        ("evaluation", None, _observation(_evaluation(0, 0.5, complete=False))),
    ],
    ids=["step", "version", "evaluation", "evaluation that goes on"],
)
def test_what_is_complete_is_a_line(path: Path, kind: str, line: dict | None, observed: Observation) -> None:
    _written(path, observed)
    expected = [] if line is None else [{"kind": kind, "run_id": "run-1", "policy": "solver", **line}]
    assert _lines(path) == expected


def test_only_what_is_new_is_appended(path: Path) -> None:
    observation = _observation(_evaluation(0, 0.25))
    observation.versions["solver"] = [version_pb2.Version(version=0)]
    with MetricsFile(path, run_id="run-1") as metrics:
        for step in (1, 2):
            observation.steps.append(StepPoint("solver", step, float(step), {}))
            observation.versions["solver"].append(version_pb2.Version(version=step))
            metrics.write(observation)
            metrics.write(observation)
    written = [(line["kind"], line.get("version", line.get("step"))) for line in _lines(path)]
    first = [("step", 1), ("version", 0), ("version", 1), ("evaluation", 0)]
    assert written == [*first, ("step", 2), ("version", 2)]


def test_the_final_evaluation_of_a_version_is_a_line_of_its_own(path: Path) -> None:
    observation = _observation(_evaluation(3, 0.5), _evaluation(3, 0.75, final=True))
    _written(path, observation)
    written = [(line["heldout_reward"], line["final"]) for line in _lines(path)]
    assert written == [(0.5, False), (0.75, True)]


def test_a_line_can_be_read_while_the_run_goes_on(path: Path) -> None:
    observation = _observation()
    with MetricsFile(path, run_id="run-1") as metrics:
        observation.steps.append(StepPoint("solver", 1, 2.5, {}))
        metrics.write(observation)
        assert [line["step"] for line in _lines(path)] == [1]


def _written(path: Path, observation: Observation) -> list[StepPoint]:
    """Write with a launcher of its own; returns the steps it found."""
    with MetricsFile(path, run_id="run-1") as metrics:
        earlier = list(metrics.earlier_steps())
        metrics.write(observation)
        return earlier


def test_what_a_launcher_forgets_once_it_was_written_is_written_once(path: Path) -> None:
    observation = _observation()
    with MetricsFile(path, run_id="run-1") as metrics:
        for step in range(1, 8):
            observation.steps.append(StepPoint("solver", step, float(step), {}))
            observation.versions.setdefault("solver", []).append(version_pb2.Version(version=step))
            metrics.write(observation)
            observation.forget(kept=2)
    written = [(line["kind"], line.get("version", line.get("step"))) for line in _lines(path)]
    assert sorted(written) == [(kind, number) for kind in ("step", "version") for number in range(1, 8)]


def test_a_cut_line_longer_than_one_look_is_removed(path: Path) -> None:
    path.write_text('{"kind": "step", "policy": "solver", "step": 1}\n' + "x" * 200_000)
    with MetricsFile(path, run_id="run-1"):
        assert [line["step"] for line in _lines(path)] == [1]


def test_a_resumed_run_writes_nothing_twice(path: Path) -> None:
    observation = _observation(_evaluation(0, 0.5), _evaluation(0, 0.5, final=True))
    observation.steps.append(StepPoint("solver", 1, 2.5, {"reward_mean": 0.5}))
    observation.versions["solver"] = [version_pb2.Version(version=0), version_pb2.Version(version=1, step=1)]
    assert _written(path, observation) == []
    before = path.read_text()
    assert _written(path, observation) == observation.steps
    assert path.read_text() == before
    observation.steps.append(StepPoint("solver", 2, 9.0, {"reward_mean": 0.75}))
    _written(path, observation)
    assert [line["step"] for line in _lines(path) if line["kind"] == "step"] == [1, 2]


def test_a_line_that_a_kill_cut_short_is_written_again(path: Path) -> None:
    observation = _observation()
    observation.steps.append(StepPoint("solver", 1, 2.5, {"reward_mean": 0.5}))
    _written(path, observation)
    whole = path.read_text()
    path.write_text(whole + whole.replace('"step": 1', '"step": 2')[:-9])
    observation.steps.append(StepPoint("solver", 2, 3.5, {"reward_mean": 0.5}))
    assert [point.step for point in _written(path, observation)] == [1]
    assert [line["step"] for line in _lines(path)] == [1, 2]


def test_numbers_that_json_does_not_know_are_null(path: Path) -> None:
    observation = _observation(_evaluation(0, math.nan))
    observation.steps.append(StepPoint("solver", 1, 2.5, {"loss": math.nan, "ratio_max": math.inf}))
    _written(path, observation)
    step, evaluation = _lines(path)
    assert (step["loss"], step["ratio_max"], evaluation["heldout_reward"]) == (None, None, None)
    [found] = _written(path, observation)
    assert math.isnan(found.metrics["loss"])


def test_values_of_any_depth_become_json_that_every_reader_takes() -> None:
    text = '{"a": [1.5, null], "b": {"c": null}, "d": "nan"}'
    assert to_json({"a": [1.5, math.nan], "b": {"c": -math.inf}, "d": "nan"}) == text


@pytest.mark.parametrize("damaged", [b'{"kind": "stap"}', b'{"kind"', b"[]", b"\xff\x00", b"7"])
def test_a_line_that_a_disk_damaged_is_passed_over(path: Path, damaged: bytes) -> None:
    with MetricsFile(path, run_id="run") as metrics:
        metrics.write(Observation(steps=[STEP]))
    whole = path.read_bytes()
    path.write_bytes(damaged + b"\n" + whole)
    with MetricsFile(path, run_id="run") as metrics:
        assert list(metrics.earlier_steps()) == [STEP]
    assert path.read_bytes() == damaged + b"\n" + whole
