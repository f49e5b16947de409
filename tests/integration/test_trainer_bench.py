"""`astraflow bench trainer` in its smallest size: every section measures, beside what it is compared with."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from astraflow_bench.trainer import methods
from astraflow_bench.trainer.gpu import model_flops
from astraflow_bench.trainer.methods import METHODS, OURS, PLAIN, TRL
from astraflow_bench.trainer.workload import rows_of
from astraflow_trainer.model.model import ModelShape
from support.cli import run

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(600)]

SIZES = (
    "--hidden 64 --layers 1 --rows 12 --median 8 --outlier 64 --turns 1 --logit-tokens 512 --logit-vocab 4096 "
    "--logit-hidden 16 --ranks 1 --ranks 2 --steps 2 --toy"
)
LENGTHS = ("geometric lengths", "one long row")
ALWAYS = {
    *(
        (f"{lengths}: rate", method)
        for lengths in LENGTHS
        for method in ("packed", "padded", "separate passes")
    ),
    ("logits of 512 tokens, 4096 words: peak memory", "chunked over whole"),
    ("logits of 512 tokens, 4096 words: time", "whole"),
    ("step with M2PO over PPO", "1 micro-batch, log-probs off by 0.1"),
    ("step with M2PO over PPO", "5 micro-batches, log-probs off by 0.4"),
    ("step: CPU over one rank", "2 ranks"),
    ("training thread blocked", "by a publication"),
    ("training thread blocked", "by a checkpoint"),
    ("training thread waits for a batch", "prefetch off"),
    ("training thread waits for a batch", "prefetch on"),
    *(("share of a step", part) for part in ("forward", "backward", "AdamW", "rounding", "copy")),
    *(("the same step: CPU of a trained token", method) for method in METHODS),
    *(("toy, 128 tokens a pass, 24 rows: rate", method) for method in METHODS),
    *(("toy, 128 tokens a pass, 24 rows: MFU", method) for method in (OURS, PLAIN)),
    ("toy, 128 tokens a pass, 24 rows: rate over the plain loop", OURS),
    ("changes on the device", "1 % of 0.0655 M"),
    ("a delta decoded and applied on the device", "1 % of 0.0655 M"),
}


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """The command joins a process group of one and keeps it for the life of the process, here the suite's."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the pages of a whole benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    # The status is not judged: targets are about sizes that mean something.
    result = run("bench", "trainer", *SIZES.split(), "--json", "--write", str(folder))
    assert json.loads((folder / "trainer.json").read_text()) == result.json
    return folder


@pytest.fixture
def figures(written: Path) -> dict[tuple[str, str], float]:
    """Its figures."""
    found = json.loads((written / "trainer.json").read_text())["figures"]
    return {(figure["what"], figure["subject"]): figure["value"] for figure in found}


def test_every_section_measures_and_has_its_page(
    written: Path, figures: dict[tuple[str, str], float]
) -> None:
    assert figures.keys() >= ALWAYS
    assert (written / "trainer.md").read_text().count("\n| ") == len(figures) + 1


def test_what_is_counted_is_exact(figures: dict[tuple[str, str], float]) -> None:
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


def test_what_is_not_here_is_said_to_be_unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(methods, "find_spec", lambda _: None)
    sizes = SIZES.removesuffix(" --toy").split()
    result = run("bench", "trainer", *sizes, "--only", "trainers", "--only", "gpu", "--write", str(tmp_path))
    figures = json.loads((tmp_path / "trainer.json").read_text())["figures"]
    missing = {(figure["what"], figure["subject"]): figure for figure in figures if figure["value"] is None}
    assert missing["the same step: CPU of a trained token", TRL]["unit"] == "trl is not installed"
    assert missing["Qwen3-8B, 8192 tokens a pass: rate", ""]["unit"] == "no GPU"
    assert "| Qwen3-8B, 8192 tokens a pass: rate |  | unmeasured: no GPU |" in result.output
    assert result.status == 0
    assert len(figures) - len(missing) == 3


def test_arithmetic_of_a_step_is_that_of_its_tokens() -> None:
    shape = ModelShape(
        vocab_size=10, hidden_size=4, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=2, intermediate_size=5,
    )  # fmt: skip
    # Queries and output 4 · 4, keys and values 4 · 2, three matrices 4 · 5; of 8 and 4 tokens 6 and 3 are trained.
    layer = 2 * 16 + 2 * 8 + 3 * 20
    assert model_flops(shape, rows_of([8, 4])) == 6 * (3 * (layer * 12 + 4 * (64 + 16)) + 10 * 4 * 9)


@pytest.mark.parametrize(
    ("options", "problem"),
    [("--only pull", "pull is none of packing, logits"), ("--hidden 100", "100 is no multiple of 64")],
)
def test_what_cannot_be_measured_is_refused(options: str, problem: str) -> None:
    result = run("bench", "trainer", *options.split())
    assert result.status == 2
    assert problem in result.errors
