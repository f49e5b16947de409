"""`astraflow bench trainer`: what a training step costs, beside the methods that others compute it."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from astraflow_bench.commands.figures_page import load_note, require_known, say, show
from astraflow_bench.commands.results_folder import AsJson, WriteFolder
from astraflow_bench.trainer.sizes import SECTIONS, TrainerSizes

__all__ = ["trainer"]

_PAGE = "trainer"


def trainer(
    only: Annotated[
        list[str] | None, typer.Option(metavar="SECTION", help="Measure only this; repeat it. Default: all.")
    ] = None,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 8,
    rows: Annotated[int, typer.Option(min=8, help="Rows of a batch.")] = 48,
    median: Annotated[int, typer.Option(min=4, help="Tokens of the row in the middle.")] = 48,
    outlier: Annotated[int, typer.Option(min=8, help="Tokens of the one long row.")] = 768,
    turns: Annotated[int, typer.Option(min=1, help="Measured turns of each work; the least counts.")] = 2,
    logit_tokens: Annotated[
        int, typer.Option(min=1, help="Trained tokens whose logits are computed.")
    ] = 2048,
    logit_vocab: Annotated[int, typer.Option(min=2, help="Words that these logits are of.")] = 151_936,
    logit_hidden: Annotated[int, typer.Option(min=1, help="Width of their hidden states.")] = 256,
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks; repeat it. Default: 1, 2, 4.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of the loop that publishes.")] = 4,
    toy: Annotated[
        bool, typer.Option("--toy", help="Run section gpu on the CPU, with this model, to see that it works.")
    ] = False,
    as_json: AsJson = False,
    write: WriteFolder = None,
) -> None:
    """What a training step costs: packing, logits, losses, ranks, publishing, waiting for batches, where time goes.

    Beside padded and separate passes, whole logits, PPO, one rank, a plain loop, and TRL; on a GPU where one is.
    Status 1: a target was missed.
    """
    require_known(only or (), SECTIONS)
    if hidden % 64:
        raise typer.BadParameter(f"{hidden} is no multiple of 64, the width of a head", param_hint="--hidden")
    sizes = TrainerSizes(
        hidden=hidden, layers=layers, rows=rows, median=median, outlier=outlier, turns=turns,
        logit_tokens=logit_tokens, logit_vocab=logit_vocab, logit_hidden=logit_hidden,
        ranks=tuple(sorted(set(ranks or (1, 2, 4)))), steps=steps, toy=toy,
    )  # fmt: skip
    _measure(sizes, only or list(SECTIONS), as_json=as_json, write=write)


def _measure(sizes: TrainerSizes, only: list[str], *, as_json: bool, write: Path | None) -> None:
    # torch takes seconds to import.
    from astraflow_bench.trainer.experiment import measure
    from astraflow_kit.log import configure

    configure("bench", log_format="json", stream=io.StringIO())
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="astraflow-trainer-") as folder:
        chosen = [name for name in SECTIONS if name in only]
        figures = measure(sizes, sections=chosen, folder=Path(folder), say=say)
    show(figures, [load_note(load)], page=_PAGE, title="Trainer", as_json=as_json, write=write)
