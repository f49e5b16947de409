"""The curves are drawn for whatever was observed, down to nothing."""

import struct
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import version_pb2
from astraflow_launcher.view.curves import draw_curves
from astraflow_launcher.view.observation import Observation, StepPoint
from support.observations import evaluation, observed

pytestmark = pytest.mark.slow


def _observed(*, rewards: tuple[float, ...]) -> Observation:
    return observed(
        *(evaluation(version, reward) for version, reward in enumerate(rewards)),
        policies=("solver", "verifier"),
        versions={"solver": [version_pb2.Version(version=0), version_pb2.Version(version=1, delta_bytes=9)]},
        steps=[StepPoint("solver", 1, 1.0, {"reward_mean": 0.5}), StepPoint("solver", 2, 2.0, {})],
    )


@pytest.mark.parametrize("observation", [Observation(), _observed(rewards=()), _observed(rewards=(0.2, 0.8))])
def test_every_observation_becomes_a_picture(observation: Observation, tmp_path: Path) -> None:
    draw_curves(observation, tmp_path / "curves.png", title="run-1")
    content = (tmp_path / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1200, 1080)


def test_other_rewards_are_another_picture(tmp_path: Path) -> None:
    for name, rewards in [("low.png", (0.1, 0.2)), ("high.png", (0.1, 0.9)), ("again.png", (0.1, 0.2))]:
        draw_curves(_observed(rewards=rewards), tmp_path / name, title="run-1")
    low, high, again = ((tmp_path / f"{name}.png").read_bytes() for name in ("low", "high", "again"))
    assert low != high
    assert low == again
