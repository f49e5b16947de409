"""`astraflow bench rollout`: engines side by side, the node around them, swaps of weights, the endpoint for agents."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from astraflow_bench.commands.results_folder import made
from astraflow_bench.machine import Origin
from astraflow_bench.rollout.figures import Figure

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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/bench.md.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", callback=made, help=f"Also write {_PAGE}.json and .md there."),
    ] = None,
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
        figures = asyncio.run(measure(sizes, recipe=recipe, sglang=python, folder=Path(folder), say=_say))
    notes = [f"load average before: {load:.1f}, after: {os.getloadavg()[0]:.1f}"]
    if python is None:
        notes.append(f"SGLang was not measured: there is no {sglang_python}; `make sglang-env` makes it")
    _show(figures, notes, as_json=as_json, write=write)


def _show(figures: Sequence[Figure], notes: Sequence[str], *, as_json: bool, write: Path | None) -> None:
    """Print and write what was found; status 1 when a target was missed."""
    origin = Origin.here()
    text = _as_json(figures, notes, origin)
    table = "\n".join([*_rows(figures), "", *(f"* {note}" for note in notes)])
    if write is not None:
        head = "# Rollouts\n\nWritten by `astraflow bench rollout`; [what the rows mean](../bench.md#rollouts).\n"
        place = f"* machine: {origin.machine}\n* date: {origin.date}, commit {origin.commit}"
        (write / f"{_PAGE}.json").write_text(f"{text}\n")
        (write / f"{_PAGE}.md").write_text(f"{head}\n{place}\n\n{table}\n")
    typer.echo(text if as_json else table)
    if any(figure.met is False for figure in figures):
        raise typer.Exit(1)


def _as_json(figures: Sequence[Figure], notes: Sequence[str], origin: Origin) -> str:
    rows = [dataclasses.asdict(figure) | {"met": figure.met} for figure in figures]
    return json.dumps({"figures": rows, "notes": notes, "origin": dataclasses.asdict(origin)}, indent=1)


def _rows(figures: Sequence[Figure]) -> list[str]:
    rows = ["| figure | engine | value | target | met |", "|---|---|---|---|---|"]
    for figure in figures:
        value = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.3g}"
        least, most = figure.least, figure.most
        target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else ""
        met = {True: "yes", False: "**no**", None: ""}[figure.met]
        rows.append(f"| {figure.what} | {figure.engine} | {value} {figure.unit} | {target} | {met} |")
    return rows


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
