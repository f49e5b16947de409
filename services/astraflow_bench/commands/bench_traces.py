"""`astraflow bench traces`: what spans of OpenTelemetry cost a run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from astraflow.recipe.shipped import shipped_recipes
from astraflow_bench.commands.figures_page import load_note, require_known, show
from astraflow_bench.commands.results_folder import AsJson, WriteFolder

MODELS = ("quickstart", "small")


def traces(
    only: Annotated[
        list[str] | None, typer.Option(help="Of quickstart and small, 0.6 and 20 M weights; repeat it.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run that are measured.")] = 30,
    turns: Annotated[
        int, typer.Option(min=1, help="Runs with and without; the least CPU of each counts.")
    ] = 5,
    as_json: AsJson = False,
    write: WriteFolder = None,
) -> None:
    """CPU of all daemons of a run, with spans exported to a collector and without, in turns.

    Status 1: the target was missed.
    """
    require_known(only or (), MODELS)
    # What it measures with, OpenTelemetry's messages, is part of no other benchmark.
    from astraflow_bench.traces import TracedLoad, measure

    recipe = shipped_recipes()["quickstart"]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="astraflow-traces-") as folder:
        figures = [
            figure
            for model in only or MODELS
            for figure in measure(
                TracedLoad(recipe=recipe, model=model, steps=steps, turns=turns), folder=Path(folder) / model
            )
        ]
    notes = [load_note(load), f"{turns} runs of {steps} steps each"]
    show(figures, notes, page="traces", title="Traces", as_json=as_json, write=write)
