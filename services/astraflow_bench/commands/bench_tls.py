"""`astraflow bench tls`: what TLS and tokens cost, beside a server without them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from astraflow_bench.commands.results_folder import AsJson
from astraflow_bench.tls import measure
from astraflow_kit.log import configure


def tls(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each; medians count.")] = 9,
    mib: Annotated[int, typer.Option(min=1, help="Pushes and fetches of 1 MiB in a round.")] = 64,
    calls: Annotated[int, typer.Option(min=1, help="Small calls in a round.")] = 400,
    as_json: AsJson = False,
) -> None:
    """Pushes, fetches and small calls over TLS with a token, beside the same without, in one run."""
    configure("bench", level="error")
    with tempfile.TemporaryDirectory(prefix="astraflow-tls-") as folder:
        rows = asyncio.run(measure(Path(folder), rounds=rounds, num_mib=mib, num_calls=calls))
    if as_json:
        typer.echo(json.dumps({"tls": [dataclasses.asdict(row) for row in rows]}))
        return
    table = Table("what", "unit", "plain", "TLS", "CPU ms, plain", "CPU ms, TLS")
    for row in rows:
        rates = f"{row.plain_per_s:,.0f}", f"{row.secure_per_s:,.0f}"
        table.add_row(row.what, row.unit, *rates, f"{row.plain_cpu_ms:.2f}", f"{row.secure_cpu_ms:.2f}")
    Console().print(table)
