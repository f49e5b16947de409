"""A probe whose numbers contradict one another never reaches a reader."""

from typing import Any

import pytest

from astraflow.weights.v1 import manifest_pb2
from astraflow_weights.versions.probe import ProbeAnswer, probe_message, read_probe

GOOD: dict[str, Any] = {
    "prompt_ids": (5, 1),
    "token_ids": (7, 0),
    "logprobs": (-0.1, 0.0),
    "margins": (0.0, 2.0),
}


def test_a_probe_comes_back_to_the_bit() -> None:
    probe = (ProbeAnswer(**GOOD), ProbeAnswer(**GOOD | {"margins": (1 / 3, 1e-300)}))
    assert read_probe(manifest_pb2.Probe.FromString(probe_message(probe).SerializeToString())) == probe


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt_ids": ()}, "0 prompt ids"),
        ({"token_ids": (), "logprobs": (), "margins": ()}, "0 tokens"),
        ({"prompt_ids": (5,) * 255}, "256 in all"),
        ({"logprobs": (-0.1,)}, "1 log-probs and 2 margins"),
        ({"logprobs": (-0.1, float("nan"))}, "log-probs"),
        ({"logprobs": (-0.1, 0.1)}, "log-probs"),
        ({"margins": (-0.1, 0.1)}, "margins"),
        ({"margins": (0.0, float("inf"))}, "margins"),
    ],
)
def test_a_contradictory_answer_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ProbeAnswer(**GOOD | change)


@pytest.mark.parametrize("count", [0, 17])
def test_a_probe_has_1_to_16_answers(count: int) -> None:
    with pytest.raises(ValueError, match=f"has {count} answers"):
        probe_message((ProbeAnswer(**GOOD),) * count)
