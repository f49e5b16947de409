"""The initial model is made once per key, appears whole, and depends on all that its key names."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from astraflow_trainer.model.model import load_causal_lm
from astraflow_trainer.model.tokenizer import TokenizerSettings
from astraflow_trainer.warm_start.cache import InitialModel, prepare_initial_model
from astraflow_trainer.warm_start.training import Example, WarmStartSettings
from support.tiny_training import TINY

INITIAL = InitialModel(
    shape=TINY,
    tokenizer=TokenizerSettings(vocab_size=280),
    num_tokenizer_texts=10,
    warm_start=WarmStartSettings(steps=2, batch_size=4),
    seed=3,
    demonstrations_digest="d",
)


def _examples() -> Iterator[Example]:
    return (Example(prompt=f"Say {n}: ", completion=f"{n} indeed") for n in range(20))


def _prepare(cache: Path, initial: InitialModel = INITIAL) -> Path:
    return prepare_initial_model(cache, initial=initial, examples=_examples)


def test_equal_settings_give_equal_weights(tmp_path: Path) -> None:
    first, second = load_causal_lm(_prepare(tmp_path / "a")), load_causal_lm(_prepare(tmp_path / "b"))
    assert all(torch.equal(p, second.get_parameter(name)) for name, p in first.named_parameters())


CHANGES = [
    replace(INITIAL, seed=4),
    replace(INITIAL, demonstrations_digest="other"),
    replace(INITIAL, num_tokenizer_texts=9),
    replace(INITIAL, tokenizer=TokenizerSettings(vocab_size=281)),
    replace(INITIAL, shape=replace(INITIAL.shape, rope_theta=5000.0)),
    replace(INITIAL, warm_start=replace(INITIAL.warm_start, learning_rate=1e-3)),
]


@pytest.mark.parametrize("changed", CHANGES)
def test_the_key_covers_every_setting(changed: InitialModel) -> None:
    assert changed.key != INITIAL.key
    assert replace(INITIAL).key == INITIAL.key


def test_the_loser_of_a_race_uses_the_winners_directory(tmp_path: Path) -> None:
    """A second process that finishes later finds the name taken."""
    other = _prepare(tmp_path / "elsewhere")

    def examples() -> Iterator[Example]:
        if not (tmp_path / "cache" / other.name).exists():
            other.rename(tmp_path / "cache" / other.name)
        return _examples()

    directory = prepare_initial_model(tmp_path / "cache", initial=INITIAL, examples=examples)
    assert directory.name == other.name
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
