"""`astraflow bench wan`: what versions cost over a long link, beside fetching whole files over the same link."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from astraflow_bench.commands.results_folder import AsJson, WriteFolder
from astraflow_bench.machine import Origin
from astraflow_bench.wan import experiment, report
from astraflow_bench.wan.experiment import Options
from astraflow_bench.wan.report import Figures, WanReport

__all__ = ["wan"]

_GBIT, _MB = 1e9, 2**20
_QUICK: dict[str, Any] = {
    "rate_bits_per_s": 0.1 * _GBIT,
    "rtt_s": 0.06,
    "model_bytes": 2 * _MB,
    "follow_versions": 2,
    "blocked_versions": 3,
    "join_version": 20,
    "step_s": 0.2,
}


def wan(
    rate_gbit: Annotated[float, typer.Option(min=0.001, help="Rate of the links, Gbit/s.")] = 4.0,
    rtt_ms: Annotated[float, typer.Option(min=1, help="Round trip of the long link, ms.")] = 300.0,
    model_mb: Annotated[int, typer.Option(min=1, help="Size of the model, MiB of bfloat16.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Of the simulated steps; decides the density.")] = 1e-6,
    follow: Annotated[int, typer.Option(min=1, help="Single versions that each node follows.")] = 4,
    publications: Annotated[int, typer.Option(min=1, help="Per way in which the trainer is followed.")] = 6,
    join_at: Annotated[int, typer.Option(min=0, help="Version at which a node begins; 0: none.")] = 50,
    step_s: Annotated[float, typer.Option(min=0, help="Least seconds of a training step.")] = 4.0,
    scaling: Annotated[
        bool, typer.Option(help="Take a share of link and model where the machine carries no more.")
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="A toy: sizes and rates are fixed, figures mean little.")
    ] = False,
    time_limit: Annotated[float, typer.Option(min=10, help="Seconds after which it gives up.")] = 1500.0,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    as_json: AsJson = False,
    write: WriteFolder = None,
) -> None:
    """Publisher, store and two nodes in network namespaces, on links of a real rate and round trip; needs root.

    Status 1: a target was missed, or the machine does not carry the link.
    """
    chosen: dict[str, Any] = {
        "rate_bits_per_s": rate_gbit * _GBIT,
        "rtt_s": rtt_ms / 1000,
        "model_bytes": model_mb * _MB,
        "follow_versions": follow,
        "blocked_versions": publications,
        "join_version": join_at,
        "step_s": step_s,
    }
    fixed: dict[str, Any] = {
        "learning_rate": learning_rate,
        "scaling": scaling,
        "time_limit_s": time_limit,
        "seed": seed,
    }
    _measure(Options(**(_QUICK if quick else chosen), **fixed), as_json=as_json, write=write)


def _measure(options: Options, *, as_json: bool, write: Path | None) -> None:
    """Run the experiment, show and write what it found; status 1 when a target was missed."""
    console = Console(stderr=as_json)
    found = experiment.run(options, progress=lambda what: console.print(f"[dim]{what}[/]"))
    if write is not None:
        report.write_page(found, folder=write, origin=Origin.here(), command=_command())
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        _print(found, console)
    if not all(target.met for target in found.targets()):
        raise typer.Exit(1)


def _command() -> str:
    """What was typed, without where it is installed and where the page went."""
    words = sys.argv[1:]
    at = words.index("--write") if "--write" in words else len(words)
    return shlex.join(["astraflow", *words[:at], "--write", "docs/results", *words[at + 2 :]])


def _print(found: WanReport, console: Console) -> None:
    for line in report.summary(found):
        console.print(line)
    for title, rows in report.tables(found):
        if rows:
            console.print(_table(title, rows))


def _table(title: str, rows: list[Figures]) -> Table:
    table = Table(*rows[0], title=title, title_justify="left", box=None, padding=(0, 1), header_style="dim")
    for row in rows:
        table.add_row(*(report.cell(value) for value in row.values()))
    return table
