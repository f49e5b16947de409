"""Token ids become the text that a tokenizer library makes of them, piece by piece."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from astraflow.errors import InvalidArgumentError
from astraflow.samples.token_texts import TokenTexts

TEXT = "Zwölf Boxkämpfer – 12 + 7 = 19\n\tπ"


def test_byte_level_pieces_are_the_text_again(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts.read(tmp_path)
    ids = tokenizer.encode(TEXT).ids
    assert "".join(texts.of(token_id) for token_id in ids) == TEXT
    assert texts.of(0) == "<|end|>"
    assert texts.of(9999) == "<9999>"


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json is no tokenizer"):
        TokenTexts.read(tmp_path)
