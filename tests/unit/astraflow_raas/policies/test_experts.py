"""Which layers route, from the model's own config, and what is believed of an engine's record."""

import json
from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import RecipeError
from astraflow_raas.engine.base import EngineFaulty
from astraflow_raas.policies.experts import ExpertLayers, read_expert_layers

MIXTURE = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
LAYERS = ExpertLayers(num_layers=3, with_experts=(0, 2), num_experts=8, experts_per_token=2)


def config(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [1]}, (0, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"num_experts": None, "num_local_experts": 8}, (0, 1, 2, 3)),
    ],
)
def test_layers_without_a_router_are_not_counted(
    changes: dict[str, object], layers: tuple[int, ...], tmp_path: Path
) -> None:
    given = {name: value for name, value in (MIXTURE | changes).items() if value is not None}
    found = read_expert_layers(config(tmp_path, given))
    assert (found.num_layers, found.with_experts) == (4, layers)
    assert (found.num_experts, found.experts_per_token) == (8, 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"num_hidden_layers": 4}, "names no experts .*num_experts_per_tok.*leave it out"),
        (MIXTURE | {"num_experts": "many"}, "names no experts"),
        (MIXTURE | {"mlp_only_layers": [0, 1, 2, 3]}, "2 of 8 experts a token in 0 layers"),
        (MIXTURE | {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ([], "names no experts"),
    ],
)
def test_a_model_without_experts_is_refused(content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        read_expert_layers(config(tmp_path, content))


def recorded(*rows: list[list[int]]) -> bytes:
    return np.asarray(rows, dtype="<i4").tobytes()


def test_rows_of_dense_layers_are_dropped() -> None:
    found = LAYERS.read(recorded([[1, 7], [0, 0], [3, 2]], [[5, 4], [0, 0], [6, 0]]), rid="r")
    assert found.dtype == np.uint8
    assert found.tolist() == [[[1, 7], [3, 2]], [[5, 4], [6, 0]]]


def test_more_experts_than_a_byte_counts_take_two() -> None:
    many = ExpertLayers(num_layers=1, with_experts=(0,), num_experts=257, experts_per_token=1)
    assert many.read(recorded([[256]]), rid="r").dtype == np.uint16


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "are 0 numbers, no multiple of 3 layers × 2 experts"),
        (recorded([[1, 2], [3, 4]]), "are 4 numbers"),
        (recorded([[1, 8], [0, 0], [3, 2]]), "are from 1 to 8 of 8"),
        (recorded([[1, -1], [0, 0], [3, 2]]), "are from -1 to 3 of 8"),
        (recorded([[1, 1], [0, 0], [3, 2]]), "or one of them twice"),
    ],
)
def test_experts_that_cannot_be_replayed_are_the_engines_fault(content: bytes, words: str) -> None:
    with pytest.raises(EngineFaulty, match=words):
        LAYERS.read(content, rid="r")
