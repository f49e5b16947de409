"""`astraflow bench rollout` in its smallest size: every part is measured, and what must hold on any machine holds."""

import json
from pathlib import Path

import pytest

from support.cli import run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SIZES = "--quick --sequences 16 --new-tokens 8 --repeats 1 --swaps 5 --node-seconds 1 --sglang-python nowhere"
ALWAYS = {
    "16 prompts × 1 samples × 8 tokens": ["transformers, dynamic cache", "CPU engine"],
    "2 prompts × 8 samples × 8 tokens": ["transformers, static cache", "CPU engine"],
    "over HTTP, 1 MB": ["CPU engine"],
    "swap, 1 MB, median": ["CPU engine"],
    "manifest to first token, 1 MB, median": ["CPU engine"],
    "tokens lost in 5 swaps, 1 MB": ["CPU engine"],
    "OpenAI endpoint, on top": [""],
    "quickstart's model, 24 tokens: throughput that the engine loses": [""],
    "quickstart's model, 24 tokens: CPU of the node, of the engine's": [""],
}


def test_every_part_is_measured_and_no_swap_loses_a_token(tmp_path: Path) -> None:
    command = ["bench", "rollout", str(ROOT / "recipes" / "quickstart"), *SIZES.split()]
    # The status is not judged: targets are about the machine.
    result = run(*command, "--json", "--write", str(tmp_path))
    written = json.loads((tmp_path / "rollout.json").read_text())
    assert written == result.json
    figures = {(figure["what"], figure["subject"]): figure for figure in written["figures"]}
    assert {(what, engine) for what, engines in ALWAYS.items() for engine in engines} <= figures.keys()
    assert figures["tokens lost in 5 swaps, 1 MB", "CPU engine"]["value"] == 0
    assert all(figure["value"] > 0 for figure in figures.values() if figure["unit"] in ("tokens/CPU-s", "ms"))
    assert any("SGLang was not measured" in note for note in written["notes"])
    page = (tmp_path / "rollout.md").read_text()
    assert page.count("\n| ") == len(figures) + 1
