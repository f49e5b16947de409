"""Rotary embeddings turn as far as transformers', at the sizes that models have."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from astraflow_engine.rotary import LinearScaling, Llama3Scaling, Rope, RotaryTable, YarnScaling

HEAD_DIM = 128
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.138, "truncate": True}
SCALINGS = [
    pytest.param("linear", LinearScaling(factor=2.0), {"factor": 2.0}, id="linear"),
    pytest.param("llama3", Llama3Scaling(**LLAMA3, original_positions=8192), LLAMA3, id="llama3"),
    pytest.param("yarn", YarnScaling(**YARN, original_positions=8192), YARN, id="yarn"),
    pytest.param(
        "yarn",
        YarnScaling(**YARN | {"truncate": False}, original_positions=8192),
        YARN | {"truncate": False},
        id="yarn-untruncated",
    ),
]


@pytest.mark.parametrize(("kind", "scaling", "fields"), SCALINGS)
def test_frequencies_are_those_of_transformers(kind: str, scaling: Any, fields: dict[str, object]) -> None:
    rope = {"rope_type": kind, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192, **fields}
    config = AutoConfig.for_model("llama", head_dim=HEAD_DIM, rope_parameters=rope)
    expected, growth = ROPE_INIT_FUNCTIONS[kind](config)
    found = Rope(theta=500_000.0, scaling=scaling).frequencies(HEAD_DIM)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert scaling.attention_factor == growth
    assert not torch.allclose(found, Rope(theta=500_000.0).frequencies(HEAD_DIM), rtol=0.1)


def test_the_table_grows_keys_and_queries_by_the_attention_factor() -> None:
    rope = Rope(theta=500_000.0, scaling=YarnScaling(**YARN, original_positions=8192))
    cosines, signed_sines = RotaryTable(rope, head_dim=HEAD_DIM, num_positions=4).at(torch.tensor([0, 3]))
    torch.testing.assert_close(
        cosines.square() + signed_sines.square(), torch.full((2, 1, HEAD_DIM), 1.138**2)
    )
