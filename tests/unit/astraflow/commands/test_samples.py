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
    body.ClearField("version_spans")
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
        return [span.style for span in coloured(compared(*trainer), None).spans if span.style != "bold"]

    assert styles(math.nan, -0.5 - fifth, -0.5 + fifth) == ["dim", "rgb(255,204,204)", "rgb(204,204,255)"]
    assert styles(math.nan, -0.5, -9.0) == ["dim", "rgb(255,255,255)", "rgb(255,0,0)"]
    # Sampled, but taken out of the loss: the difference is not known.
    assert styles(math.nan, math.nan, 0.0)[1:] == ["dim", "rgb(71,71,255)"]


def test_without_colours_the_difference_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(differences(compared(math.nan, -0.75, math.nan), None))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["token", "version", "engine", "trainer", "trainer", "-", "engine"],
        ["0"],
        ["1", "0", "-0.5000", "-0.7500", "-0.2500"],
        ["2", "0", "-0.5000"],
    ]


def test_turns_begin_with_their_role_and_versions_where_they_begin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_trajectory("t", num_prompt=2, num_response=2, version=7, swapped_to=8)
    content = SampleContent(trajectory=Trajectory.FromString(made.body))
    content.trajectory.turn_spans.add(start=0, end=2, role="tool")
    content.trajectory.turn_spans.add(start=2, end=4, role="assistant", reward=0.5)
    assert coloured(content, None).plain == "tool:\n0 1 \nassistant, reward 0.5:\n[v7]2 [v8]3 "
    Console(width=80).print(differences(content, None))
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["tool:"], ["0"], ["1"], ["assistant,", "reward"], ["2", "7"], ["3", "8"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "asked"), [("", (0, 0)), ("12", (12, 12)), ("3:9", (3, 9)), ("3:", (3, 0)), (":9", (0, 9))]
)
def test_steps_are_a_range(steps: str, asked: tuple[int, int]) -> None:
    request = Chosen(steps=steps).request("run")
    assert (request.min_step, request.max_step) == asked


def test_steps_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="10:20"):
        Chosen(steps="a:b").request("run")
