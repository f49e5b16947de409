"""Suggestions."""

import re

import pytest

from astraflow_kit.nearest import did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "sentence"),
    [
        ("rolout", ["rollout", "trainer"], "Did you mean 'rollout'?"),
        ("xyz", ["rollout", "trainer"], "Known: rollout, trainer."),
        ("xyz", [f"name{n:02}" for n in range(15)], "Known: name00, .*name11 and 3 more."),
        ("xyz", [], "There are none to choose from."),
    ],
)
def test_a_wrong_name_gets_one_sentence(name: str, known: list[str], sentence: str) -> None:
    assert re.fullmatch(sentence.replace("?", r"\?"), did_you_mean(name, known))
