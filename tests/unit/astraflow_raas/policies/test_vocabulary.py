"""No token id outside the vocabulary reaches an engine or leaves it."""

import json
from pathlib import Path

import pytest

from astraflow.errors import RecipeError
from astraflow.plugins import VersionSpan
from astraflow_raas.engine.base import EngineFaulty, EngineRefused, Generation
from astraflow_raas.policies.vocabulary import check_call, check_generation, read_vocab_size
from support.raas_parts import generate_call


@pytest.mark.parametrize("config", [{"vocab_size": 97}, {"text_config": {"vocab_size": 97}}])
def test_the_size_is_that_of_the_language_model(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vocab_size(tmp_path) == 97


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"vocab_size": "many"}', '{"vocab_size": 0}'])
def test_a_config_without_it_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RecipeError, match=r"config\.json"):
        read_vocab_size(tmp_path)


@pytest.mark.parametrize("token", [-1, 97, 10**9])
def test_a_prompt_with_an_unknown_token_is_never_sent(token: int) -> None:
    check_call(generate_call(prompt_ids=(0, 96)), vocab_size=97)
    with pytest.raises(EngineRefused, match=rf"prompt_ids\[1\] of call r0 is {token}, .* from 0 to 96"):
        check_call(generate_call(prompt_ids=(5, token)), vocab_size=97)


@pytest.mark.parametrize("token", [-1, 97, 3.0, True, None])
def test_a_sampled_token_that_is_unknown_is_not_believed(token: int) -> None:
    given = {"logprobs": (-1.0, -1.0), "spans": (VersionSpan(0, 2, 1),), "finish_reason": "stop"}
    check_generation(generate_call(), Generation(token_ids=(0, 96), **given), vocab_size=97)
    with pytest.raises(EngineFaulty, match="output token 1 of call r0 is"):
        check_generation(generate_call(), Generation(token_ids=(5, token), **given), vocab_size=97)
