"""Which checkpoints can be served: read from config.json, refused by field."""

import json
from pathlib import Path

import pytest

from astraflow_engine import errors, model_config
from support.tiny_qwen import EOS


def rewrite(folder: Path, file: str = "config.json", /, **changes: object) -> None:
    """Change fields of a JSON file; None deletes one."""
    path = folder / file
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_the_sizes_come_from_the_checkpoint(folder: Path) -> None:
    config = model_config.load_model_config(folder)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.rope_theta, config.tied_embeddings, config.eos_token_ids) == (10_000.0, True, {EOS})


def test_end_tokens_of_the_generation_config_count_too(folder: Path) -> None:
    rewrite(folder, "generation_config.json", eos_token_id=[5, 6])
    assert model_config.load_model_config(folder).eos_token_ids == {EOS, 5, 6}


def test_the_older_form_of_rope_is_read(folder: Path) -> None:
    rewrite(folder, rope_parameters=None, rope_theta=1_000_000.0)
    assert model_config.load_model_config(folder).rope_theta == 1_000_000.0


NOT_SERVED = [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"eos_token_id": 4_000}, r"eos_token_id \[4000\] is outside the vocabulary of 97"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"vocab_size": "97"}, "vocab_size is '97'"),
]


@pytest.mark.parametrize(("changes", "complaint"), NOT_SERVED)
def test_what_cannot_be_served_is_refused(folder: Path, changes: dict[str, object], complaint: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(errors.ModelError, match=complaint):
        model_config.load_model_config(folder)


def test_broken_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(errors.ModelError, match="is not JSON"):
        model_config.load_model_config(folder)
