"""The text of a recipe as anybody may send it: refused by its bounds, with source, line and bound, whatever it is."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import RecipeError
from astraflow.recipe import document
from astraflow.recipe.document import MAX_BYTES, MAX_DEPTH, MAX_VALUES, read_document

LAUGHS = ["a: &a [1,1,1,1,1,1,1,1,1,1]"]
LAUGHS += [f"{name}: &{name} [{','.join(['*' + before] * 10)}]" for before, name in pairwise("abcdef")]
REFUSED = {
    "flow": ("[" * 20_000, f"s:1: not valid YAML: nested deeper than {MAX_DEPTH}"),
    "blocks": ("- " * 20_000, "nested deeper than"),
    "keys": ("? " * 20_000, "nested deeper than"),
    "line": ("run: 1\nx:\n  " + "{a: " * 100, "s:3: "),
    "size": ("#" * (MAX_BYTES + 1), f"s: {MAX_BYTES + 1} bytes, at most {MAX_BYTES}"),
    "aliases": ("\n".join(LAUGHS), f"more than {MAX_VALUES} values"),
    "integer": ("a: " + "9" * 5000, "s: not valid YAML: ValueError"),
    "date": ("a: 2024-99-99", "month must be in"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_text_beyond_a_bound_is_refused(what: str) -> None:
    text, words = REFUSED[what]
    with pytest.raises(RecipeError) as refused:
        read_document(text, source="s")
    assert words in refused.value.message


def test_text_within_all_bounds_is_read() -> None:
    deepest = "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2)
    assert read_document(f"a: {deepest}", source="s")
    assert read_document("a: 1 #".ljust(MAX_BYTES, "#"), source="s") == {"a": 1}


def test_reading_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_CPU_S", 0.0)
    with pytest.raises(RecipeError, match="reading it takes more than 0 s"):
        read_document("a: 1", source="s")


PIECES = [*"[]{},:-?&*!|>'\"%@#a1\n\t \\", "<<: ", "*a", "&a ", "- ", "\n  ", "---\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=60))
@settings(max_examples=300, deadline=None)
def test_whatever_the_text_is_it_is_read_or_refused(pieces: list[str]) -> None:
    with suppress(RecipeError):
        read_document("".join(pieces), source="s")
