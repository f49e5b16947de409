"""Token ids as text, from a `tokenizer.json`: what a person reads, not what a model is given.

Pure but for reading the file; needs no tokenizer library. Pieces of byte-level vocabularies become their bytes again,
`▁` a blank. Used by `samples`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from astraflow.errors import InvalidArgumentError


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, pieces: dict[int, str], *, special: frozenset[int]) -> None:
        self._pieces, self._special = pieces, special

    @classmethod
    def read(cls, path: Path) -> TokenTexts:
        """Read a `tokenizer.json`, or that of a folder. Raises InvalidArgumentError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"{file} is no tokenizer.json that can be read ({type(error).__name__}: {error}); give the folder of "
                "a checkpoint, or of `astraflow weights export`"
            ) from error

    @classmethod
    def parse(cls, text: str | bytes) -> TokenTexts:
        """Read the content of a `tokenizer.json`. Raises ValueError for what is none."""
        try:
            content = json.loads(text)
            vocabulary = content["model"]["vocab"]
            named = vocabulary.items() if isinstance(vocabulary, dict) else _numbered(vocabulary)
            added = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
            return cls({number: piece for piece, number in named} | added, special=frozenset(added))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def of(self, token_id: int) -> str:
        """The text of a token; its number in angle brackets where the vocabulary lacks it."""
        piece = self._pieces.get(token_id)
        if piece is None:
            return f"<{token_id}>"
        if token_id in self._special:
            return piece
        known = _bytes_of_letters()
        if all(letter in known for letter in piece):
            return bytes(known[letter] for letter in piece).decode(errors="replace")
        return piece.replace("▁", " ")


def _numbered(vocabulary: list[list[object]]) -> list[tuple[str, int]]:
    return [(str(entry[0]), number) for number, entry in enumerate(vocabulary)]


@cache
def _bytes_of_letters() -> dict[str, int]:
    """The letter by which byte-level vocabularies write each byte: itself where it can be printed."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [number for number in range(256) if number not in printed]
    return {chr(number): number for number in printed} | {
        chr(256 + place): number for place, number in enumerate(others)
    }
