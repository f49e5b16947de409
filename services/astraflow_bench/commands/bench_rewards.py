"""`astraflow bench rewards`: what grading costs on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from astraflow_bench.rewards import measure


def rewards(
    calls: Annotated[int, typer.Option(min=1, help="Gradings of one timing.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="Tries of each timing; the best counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Gradings a second of the ready-made rewards: in the loop, in worker processes, in the sandbox."""
    rows = asyncio.run(measure(calls=calls, rounds=rounds))
    if as_json:
        typer.echo(json.dumps({"rewards": [dataclasses.asdict(row) for row in rows]}))
        return
    table = Table("reward", "side by side", "gradings/s", "ms each")
    for row in rows:
        table.add_row(row.name, str(row.side_by_side), f"{row.per_s:,.0f}", f"{row.ms:.3f}")
    Console().print(table)
