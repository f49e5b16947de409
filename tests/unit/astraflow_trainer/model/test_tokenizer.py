"""The small tokenizer keeps digits apart, loses nothing, and renders ChatML."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from astraflow_trainer.model.tokenizer import TokenizerSettings, render_chat, train_tokenizer

CORPUS = [f"Ann has {n} apples and gets {n + 7} more. \\boxed{{{2 * n + 7}}}" for n in range(10, 60)]
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]


def test_digits_are_never_merged() -> None:
    tokenizer = train_tokenizer(CORPUS, settings=TokenizerSettings())
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("boxed{1234}", add_special_tokens=False))
    assert [token for token in tokens if any(sign.isdigit() for sign in token)] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["Ann has 12 apples.", "naïve ☃ \t\n 中文", "<|im_end|>"])
def test_every_text_survives_encoding(text: str) -> None:
    tokenizer = train_tokenizer(CORPUS, settings=TokenizerSettings())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_fixed_ids_and_the_template_renders_chatml(tmp_path: Path) -> None:
    train_tokenizer(CORPUS, settings=TokenizerSettings()).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)
    text = loaded.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(MESSAGES) == text


def test_equal_corpora_give_equal_tokenizers_within_the_size() -> None:
    first, second = (train_tokenizer(CORPUS, settings=TokenizerSettings(vocab_size=300)) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) <= 300


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 100 cannot hold 3 special tokens and 256 bytes"):
        TokenizerSettings(vocab_size=100)
