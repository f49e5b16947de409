"""What `samples` shows of a sample, and which steps it asks for."""

import math

import numpy as np
import pytest
from rich.console import Console

from astraflow.commands.samples import Chosen, coloured, differences
from astraflow.dataflow.v1.sample_service_pb2 import SampleContent
from astraflow.errors import InvalidArgumentError
from astraflow.rollout.v1.trajectory_pb2 import Trajectory
from support.dataflow_world import make_trajectory


def test_tokens_are_redder_the_less_likely_they_were() -> None:
    body = Trajectory.FromString(make_trajectory("t", num_prompt=1, num_response=1).body)
    shown = coloured(SampleContent(trajectory=body), None)
    # exp(−0.5): a sixth of the range of 3, so a sixth of green and blue is gone.
    assert [(shown.plain[span.start : span.end], span.style) for span in shown.spans] == [
        ("0 ", "dim"),
        ("1 ", "rgb(255,212,212)"),
    ]


def compared(*trainer: float) -> SampleContent:
    """A prompt of one token and two sampled with log-prob −0.5, with what the trainer made of the three."""
    body = Trajectory.FromString(make_trajectory("t", num_prompt=1, num_response=2).body)
    return SampleContent(trajectory=body, trainer_logprobs=np.array(trainer, dtype="<f4").tobytes())


def test_where_the_trainers_part_is_there_tokens_are_coloured_by_the_difference() -> None:
    fifth = math.log(2) / 5  # of the deepest colour

    def styles(*trainer: float) -> list[object]:
        return [span.style for span in coloured(compared(*trainer), None).spans]

    assert styles(math.nan, -0.5 - fifth, -0.5 + fifth) == ["dim", "rgb(255,204,204)", "rgb(204,204,255)"]
    assert styles(math.nan, -0.5, -9.0) == ["dim", "rgb(255,255,255)", "rgb(255,0,0)"]
    # Sampled, but taken out of the loss: the difference is not known.
    assert styles(math.nan, math.nan, 0.0)[1:] == ["dim", "rgb(71,71,255)"]


def test_without_colours_the_difference_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(differences(compared(math.nan, -0.75, math.nan), None))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["token", "engine", "trainer", "trainer", "-", "engine"],
        ["0"],
        ["1", "-0.5000", "-0.7500", "-0.2500"],
        ["2", "-0.5000"],
    ]


@pytest.mark.parametrize(
    ("steps", "asked"), [("", (0, 0)), ("12", (12, 12)), ("3:9", (3, 9)), ("3:", (3, 0)), (":9", (0, 9))]
)
def test_steps_are_a_range(steps: str, asked: tuple[int, int]) -> None:
    request = Chosen(steps=steps).request("run")
    assert (request.min_step, request.max_step) == asked


def test_steps_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="10:20"):
        Chosen(steps="a:b").request("run")
