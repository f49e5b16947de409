"""The warm start learns, covers completions only, and gives the same bits on any number of threads."""

import itertools

import numpy as np
import pytest
import torch

from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.model.tokenizer import TokenizerSettings, train_tokenizer
from astraflow_trainer.warm_start import training
from support.tiny_training import MakePolicy


def _examples(count: int, *, seed: int = 0) -> training.EncodedExamples:
    """Prompts of random ids whose completion repeats their first id; id 31 ends the text."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, 8, int(generator.integers(1, 7))).tolist() for _ in range(count)]
    pieces = [[*prompt, prompt[0], 31] for prompt in prompts]
    return training.EncodedExamples(
        token_ids=np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces]),
        starts=np.cumsum([0, *map(len, pieces)], dtype=np.int64),
        prompt_lengths=np.asarray([len(prompt) for prompt in prompts], dtype=np.int64),
    )


def _train(policy: PolicyModel, *, steps: int = 12, num_threads: int = 1, **changes: float) -> list[float]:
    settings = training.WarmStartSettings(steps=steps, batch_size=16, **changes)  # type: ignore[arg-type]
    examples = _examples(settings.num_examples)
    report = training.warm_start(
        policy.causal_lm, examples=examples, settings=settings, num_threads=num_threads
    )
    return list(report.losses)


def test_the_loss_falls_well_below_its_start(unsharded: PolicyModel) -> None:
    losses = _train(unsharded, steps=60, learning_rate=1e-2)
    assert losses[-1] < 0.6 * losses[0]


def test_threads_change_no_bit(make_policy: MakePolicy) -> None:
    one, two = make_policy(sharded=False), make_policy(sharded=False)
    assert _train(one, num_threads=1) == _train(two, num_threads=2)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name)), name
    assert torch.get_num_threads() == 1


def test_shards_change_the_padding_not_the_loss(make_policy: MakePolicy) -> None:
    whole = _train(make_policy(sharded=False), num_shards=1)
    cut = _train(make_policy(sharded=False), num_shards=5)
    assert cut == pytest.approx(whole, abs=1e-4)


def test_the_first_loss_is_the_plain_cross_entropy_of_the_completions(unsharded: PolicyModel) -> None:
    examples = _examples(16)
    total, count = 0.0, 0
    with torch.no_grad():
        ends = zip(itertools.pairwise(examples.starts), examples.prompt_lengths, strict=True)
        for (start, end), prompt in ends:
            ids = torch.from_numpy(examples.token_ids[start:end])
            logits = unsharded.causal_lm(input_ids=ids[None]).logits[0, prompt - 1 : -1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[prompt:], reduction="sum"))
            count += len(ids) - int(prompt)
    assert _train(unsharded, steps=1)[0] == pytest.approx(total / count, rel=1e-5)


def test_progress_is_told_after_each_step(unsharded: PolicyModel) -> None:
    settings = training.WarmStartSettings(steps=3, batch_size=4)
    told: list[tuple[int, float]] = []
    model, examples = unsharded.causal_lm, _examples(12)
    report = training.warm_start(
        model, examples=examples, settings=settings, progress=lambda *now: told.append(now)
    )
    assert told == list(enumerate(report.losses, start=1))
    assert report.num_tokens == int(examples.lengths.sum())


def test_encoding_keeps_prompt_and_completion_apart_and_adds_the_end() -> None:
    tokenizer = train_tokenizer(["ab ab ab"], settings=TokenizerSettings())
    examples = [training.Example(prompt="a", completion="b"), training.Example(prompt="ab", completion="")]
    encoded = training.encode_examples(examples, tokenizer=tokenizer)
    end = tokenizer.eos_token_id
    (a,), (b,) = (tokenizer.encode(sign, add_special_tokens=False) for sign in "ab")
    (joined,) = tokenizer.encode("ab", add_special_tokens=False)
    assert encoded.token_ids.tolist() == [a, b, end, joined, end]
    assert encoded.prompt_lengths.tolist() == [1, 1]
    assert encoded.lengths.tolist() == [3, 2]


def test_too_few_examples_and_a_diverging_loss_are_refused(unsharded: PolicyModel) -> None:
    settings = training.WarmStartSettings(steps=2, batch_size=4)
    with pytest.raises(ValueError, match="2 steps of 4 need 8 examples, got 7"):
        training.warm_start(unsharded.causal_lm, examples=_examples(7), settings=settings)
    with torch.no_grad():
        unsharded.causal_lm.get_decoder().norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan; lower learning_rate"):
        _train(unsharded, steps=1)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="must each be at least 1"):
        training.WarmStartSettings(steps=0)
