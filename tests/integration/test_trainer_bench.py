"""`astraflow bench trainer` in its smallest size: every section measures, beside what it is compared with."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from support.cli import run

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(600)]

SIZES = (
    "--hidden 64 --layers 1 --rows 12 --median 8 --outlier 64 --turns 1 --logit-tokens 512 --logit-vocab 4096 "
    "--logit-hidden 16 --ranks 1 --ranks 2 --steps 2"
)
LENGTHS = ("geometric lengths", "one long row")
ALWAYS = {
    *((f"{lengths}: rate", way) for lengths in LENGTHS for way in ("packed", "padded", "separate passes")),
    ("logits of 512 tokens, 4096 words: peak memory", "chunked over whole"),
    ("logits of 512 tokens, 4096 words: time", "whole"),
    ("step with M2PO over PPO", "1 micro-batch"),
    ("step with M2PO over PPO", "5 micro-batches"),
    ("step: CPU over one rank", "2 ranks"),
    ("training thread blocked", "by a publication"),
    ("training thread blocked", "by a checkpoint"),
    *(("share of a step", part) for part in ("forward", "backward", "AdamW", "rounding", "copy")),
}


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """The command joins a process group of one and keeps it for the life of the process, here the suite's."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_section_measures_and_has_its_page(tmp_path: Path) -> None:
    # The status is not judged: targets are about sizes that mean something.
    result = run("bench", "trainer", *SIZES.split(), "--json", "--write", str(tmp_path))
    written = json.loads((tmp_path / "trainer.json").read_text())
    assert written == result.json
    figures = {(figure["what"], figure["subject"]): figure["value"] for figure in written["figures"]}
    assert figures.keys() >= ALWAYS
    page = (tmp_path / "trainer.md").read_text()
    assert page.count("\n| ") == len(figures) + 1


def test_what_is_counted_is_exact() -> None:
    result = run("bench", "trainer", *SIZES.split(), "--only", "packing", "--only", "split", "--json")
    figures = {(figure["what"], figure["subject"]): figure["value"] for figure in result.json["figures"]}
    for lengths in LENGTHS:
        assert figures[f"{lengths}: positions computed", "separate passes"] == 1.0
        assert figures[f"{lengths}: passes", "separate passes"] == 12
        assert (
            figures[f"{lengths}: positions computed", "padded"]
            > figures[f"{lengths}: positions computed", "packed"]
        )
    # Twelve rows padded to the one of 64 tokens beside eleven of 8.
    assert figures["one long row: positions computed", "padded"] == pytest.approx(12 * 64 / (64 + 11 * 8))
    assert sum(value for (what, _), value in figures.items() if what == "share of a step") == pytest.approx(
        100
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [("--only pull", "pull is none of packing, logits"), ("--hidden 100", "100 is no multiple of 64")],
)
def test_what_cannot_be_measured_is_refused(options: str, problem: str) -> None:
    result = run("bench", "trainer", *options.split())
    assert result.status == 2
    assert problem in result.errors
