"""What `samples` shows of a sample, and which steps it asks for."""

import pytest

from astraflow.commands.samples import Chosen, coloured
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


@pytest.mark.parametrize(
    ("steps", "asked"), [("", (0, 0)), ("12", (12, 12)), ("3:9", (3, 9)), ("3:", (3, 0)), (":9", (0, 9))]
)
def test_steps_are_a_range(steps: str, asked: tuple[int, int]) -> None:
    request = Chosen(steps=steps).request("run")
    assert (request.min_step, request.max_step) == asked


def test_steps_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="10:20"):
        Chosen(steps="a:b").request("run")
