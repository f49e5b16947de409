"""`astraflow bench policies`: policies trained together, against each of them alone."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from astraflow_bench import policies as measurement
from astraflow_bench.commands.results_folder import AsJson, WriteFolder
from astraflow_bench.machine import Origin
from astraflow_bench.policies import MAX_NO_CREDIT, MAX_WALL_RATIO, Comparison, Difference
from astraflow_launcher.view.metrics_file import to_json

__all__ = ["policies"]

_RECIPE = Path("recipes/solver-verifier-tiny")
_PAGE = "two-policies"


def policies(
    recipe: Annotated[Path, typer.Argument(help="Recipe that trains two policies or more.")] = _RECIPE,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 … N-1, each with every arrangement.")] = 3,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeatable."),
    ] = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Give each policy of the default recipe a game of its own.")
    ] = False,
    timed: Annotated[
        bool,
        typer.Option("--timed", help="Wall time alone, of calls and steps that sleep; needs no idle cores."),
    ] = False,
    as_json: AsJson = False,
    write: WriteFolder = None,
) -> None:
    """Reward per step and wall time of policies trained in one run, against each of them trained alone.

    Needs a quiet machine with a core for every trainer and one for the engines. Status 1: a target was missed.
    """
    arranged = measurement.TIMED if timed else measurement.APART if apart else ()
    with tempfile.TemporaryDirectory(prefix="astraflow-policies-") as folder:
        try:
            found = measurement.measure(
                recipe,
                seeds=seeds,
                folder=Path(folder),
                overrides=(*arranged, *(overrides or ())),
                say=_say,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="RECIPE") from error
    if timed:  # rewards of models that have learned nothing
        found = dataclasses.replace(found, mean_reward={}, heldout={})
    origin = Origin.here()
    figures = {**dataclasses.asdict(found), "wall_ratio": found.wall_ratio, "met": found.met}
    text = to_json({**figures, "origin": dataclasses.asdict(origin)})
    table = "\n".join(_rows(found))
    if write is not None:
        head = f"# Policies together and alone\n\nWritten by `astraflow bench policies`, {recipe.name}.\n"
        place = f"* machine: {origin.machine}\n* date: {origin.date}, commit {origin.commit}"
        (write / f"{_PAGE}.json").write_text(f"{text}\n")
        (write / f"{_PAGE}.md").write_text(f"{head}\n{place}\n\n{table}\n")
    typer.echo(text if as_json else table)
    if not found.met:
        raise typer.Exit(1)


def _rows(found: Comparison) -> list[str]:
    rows = ["| figure | together | alone | limit | met |", "|---|---|---|---|---|"]
    for name, item in found.mean_reward.items():
        rows.append(
            f"| {name}: reward, mean of all steps | {_cells(item)} | within noise | {item.within_noise} |"
        )
    for name, item in found.heldout.items():
        rows.append(f"| {name}: held out at the end | {_cells(item)} | | |")
    wall, dropped = found.wall_ratio, found.no_credit
    each = ", ".join(f"{ratio:.2f}" for ratio in found.wall_ratios)
    rows.append(
        f"| wall time, over the slower alone | {wall:.2f} ({each}) | 1 | {MAX_WALL_RATIO} "
        f"| {wall <= MAX_WALL_RATIO} |"
    )
    rows.append(
        f"| dropped as no_credit | {dropped:.1%} | | {MAX_NO_CREDIT:.0%} | {dropped <= MAX_NO_CREDIT} |"
    )
    return [*rows, "", f"{len(found.seeds)} seeds; ± is the standard error of the difference."]


def _cells(item: Difference) -> str:
    return f"{item.together:.3f} ± {item.standard_error:.3f} | {item.alone:.3f}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
