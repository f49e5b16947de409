"""The curves are drawn for whatever was observed, down to nothing."""

import struct
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import version_pb2
from astraflow_launcher.view.curves import draw_curves
from astraflow_launcher.view.metrics_file import MetricsFile
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.totals import StepPoint
from support.observations import evaluation, observed

pytestmark = pytest.mark.slow


def _observed(*, rewards: tuple[float, ...]) -> Observation:
    return observed(
        *(evaluation(version, reward) for version, reward in enumerate(rewards)),
        policies=("solver", "verifier"),
        versions={"solver": [version_pb2.Version(version=0), version_pb2.Version(version=1, delta_bytes=9)]},
        steps=[StepPoint("solver", 1, 1.0, {"reward_mean": 0.5}), StepPoint("solver", 2, 2.0, {})],
    )


def _draw(observation: Observation, path: Path) -> bytes:
    """Draw from a metrics file that has what was observed."""
    lines = path.with_suffix(".jsonl")
    with MetricsFile(lines, run_id="run-1") as metrics:
        metrics.write(observation)
    draw_curves(observation, path, metrics=lines, title="run-1")
    return path.read_bytes()


@pytest.mark.parametrize("observation", [Observation(), _observed(rewards=()), _observed(rewards=(0.2, 0.8))])
def test_every_observation_becomes_a_picture(observation: Observation, tmp_path: Path) -> None:
    content = _draw(observation, tmp_path / "curves.png")
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1200, 1080)


def test_other_rewards_are_another_picture(tmp_path: Path) -> None:
    rewards = {"low": (0.1, 0.2), "high": (0.1, 0.9), "again": (0.1, 0.2)}
    drawn = {name: _draw(_observed(rewards=each), tmp_path / f"{name}.png") for name, each in rewards.items()}
    assert drawn["low"] != drawn["high"]
    assert drawn["low"] == drawn["again"]


def test_a_step_that_the_launcher_no_longer_holds_is_drawn(tmp_path: Path) -> None:
    whole, forgotten = _observed(rewards=(0.1,)), _observed(rewards=(0.1,))
    expected = _draw(whole, tmp_path / "whole.png")
    forgotten.forget(kept=1)
    draw_curves(forgotten, tmp_path / "curves.png", metrics=tmp_path / "whole.jsonl", title="run-1")
    assert (tmp_path / "curves.png").read_bytes() == expected
