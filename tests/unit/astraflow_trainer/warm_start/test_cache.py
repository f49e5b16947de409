"""The initial model is made once per key, appears whole, and depends on all that its key names."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow_trainer.model.model import load_causal_lm
from astraflow_trainer.model.tokenizer import TokenizerSettings
from astraflow_trainer.warm_start.cache import InitialModel, digest_of, prepare_initial_model
from astraflow_trainer.warm_start.training import Example, WarmStartSettings
from support.tiny_training import TINY

INITIAL = InitialModel(
    shape=TINY,
    tokenizer=TokenizerSettings(vocab_size=280),
    warm_start=WarmStartSettings(steps=2, batch_size=4),
    seed=3,
    digests=("t", "d"),
)


EXAMPLES = [Example(prompt=f"Say {n}: ", completion=f"{n} indeed") for n in range(20)]


def _prepare(cache: Path, initial: InitialModel = INITIAL, **more: Any) -> Path:
    return prepare_initial_model(
        cache, initial=initial, tokenizer_examples=EXAMPLES, examples=EXAMPLES, **more
    )


def test_equal_settings_give_equal_weights(tmp_path: Path) -> None:
    first, second = load_causal_lm(_prepare(tmp_path / "a")), load_causal_lm(_prepare(tmp_path / "b"))
    assert all(torch.equal(p, second.get_parameter(name)) for name, p in first.named_parameters())


CHANGES = [
    replace(INITIAL, seed=4),
    replace(INITIAL, digests=("t", "other")),
    replace(INITIAL, digests=("other", "d")),
    replace(INITIAL, tokenizer=TokenizerSettings(vocab_size=281)),
    replace(INITIAL, shape=replace(INITIAL.shape, rope_theta=5000.0)),
    replace(INITIAL, warm_start=replace(INITIAL.warm_start, learning_rate=1e-3)),
]


@pytest.mark.parametrize("changed", CHANGES)
def test_the_key_covers_every_setting(changed: InitialModel) -> None:
    assert changed.key != INITIAL.key
    assert replace(INITIAL).key == INITIAL.key


def test_of_several_at_once_one_makes_the_model_and_the_others_wait(tmp_path: Path) -> None:
    steps: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        made = [
            pool.submit(_prepare, tmp_path, progress=lambda step, _loss: steps.append(step)) for _ in range(3)
        ]
    assert steps == [1, 2]
    assert list(tmp_path.iterdir()) == [made[0].result()] == [made[1].result()] == [made[2].result()]


def test_a_digest_tells_apart_where_a_prompt_ends() -> None:
    texts = [("ab", "c"), ("a", "bc"), ("abc", "")]
    assert len({digest_of([Example(prompt=p, completion=c)]) for p, c in texts}) == 3
