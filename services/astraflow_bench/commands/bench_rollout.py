"""`astraflow bench rollout`: engines side by side, the node around them, swaps of weights, the endpoint for agents."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from astraflow_bench.commands.figures_page import load_note, say, show
from astraflow_bench.commands.results_folder import AsJson, WriteFolder

__all__ = ["rollout"]

_PAGE = "rollout"
_SGLANG = Path(".venv-sglang/bin/python")
_RECIPE = Path("recipes/quickstart")


def rollout(
    recipe: Annotated[
        Path, typer.Argument(help="Recipe of the whole node; one trained policy `solver`.")
    ] = _RECIPE,
    sequences: Annotated[int, typer.Option(min=8, help="Sequences that engines are compared on.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, max=256, help="Tokens of each.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Tries of each timing; the best counts.")] = 5,
    swaps: Annotated[int, typer.Option(min=1, help="Swaps of weights under load, per engine and model.")] = 8,
    node_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of each of three turns with a whole node; 0 leaves it out.")
    ] = 8.0,
    sglang_python: Annotated[
        Path, typer.Option(help="Python of an environment with SGLang; `make sglang-env` makes one.")
    ] = _SGLANG,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the smallest model: figures mean little.")
    ] = False,
    as_json: AsJson = False,
    write: WriteFolder = None,
) -> None:
    """What rollouts cost: the CPU engine beside transformers and SGLang, the node, swaps, the OpenAI endpoint.

    Status 1: a target was missed.
    """
    # torch takes seconds to import.
    from astraflow_bench.rollout.experiment import Sizes, measure
    from astraflow_kit.log import configure

    if node_seconds and not recipe.exists():
        raise typer.BadParameter(f"{recipe} does not exist; run it in a checkout, or give --node-seconds 0")
    configure("bench", log_format="json", stream=io.StringIO())
    sizes = Sizes(
        sequences=sequences, new_tokens=new_tokens, repeats=repeats, swaps=swaps, node_seconds=node_seconds,
        is_quick=quick,
    )  # fmt: skip
    python = sglang_python if sglang_python.exists() else None
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="astraflow-rollout-") as folder:
        figures = asyncio.run(measure(sizes, recipe=recipe, sglang=python, folder=Path(folder), say=say))
    notes = [load_note(load)]
    if python is None:
        notes.append(f"SGLang was not measured: there is no {sglang_python}; `make sglang-env` makes it")
    show(figures, notes, page=_PAGE, title="Rollouts", as_json=as_json, write=write)
