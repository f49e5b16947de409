"""`astraflow bench dataflow`: the data plane beside raw streams, raw Redis and the published system's buffer."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from astraflow_bench.commands.figures_page import load_note, require_known, say, show
from astraflow_bench.commands.results_folder import AsJson, WriteFolder
from astraflow_bench.dataflow.experiment import SECTIONS, measure
from astraflow_bench.dataflow.sizes import PlaneSizes

__all__ = ["dataflow"]

_PAGE = "dataflow"
_Series = list[int]


def dataflow(
    only: Annotated[
        list[str] | None, typer.Option(metavar="SECTION", help="Measure only this; repeat it. Default: all.")
    ] = None,
    tokens: Annotated[_Series | None, typer.Option(min=1, help="Response tokens; repeat it.")] = None,
    batch_groups: Annotated[int, typer.Option(min=1, help="Groups of 8 in a batch.")] = 64,
    batches: Annotated[int, typer.Option(min=1, help="Batches of 2k tokens that are pushed.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of pushes and of raw streams.")] = 9,
    leases: Annotated[int, typer.Option(min=1, help="Tasks that are leased, and again.")] = 64_000,
    streams: Annotated[_Series | None, typer.Option(min=1, help="Idle streams; repeat it.")] = None,
    idle_seconds: Annotated[float, typer.Option(min=0.1, help="How long something idle is watched.")] = 20.0,
    backlog: Annotated[_Series | None, typer.Option(min=1, help="Waiting tasks; repeat it.")] = None,
    open_groups: Annotated[_Series | None, typer.Option(min=1, help="Open groups; repeat it.")] = None,
    ready: Annotated[int, typer.Option(min=8, help="Ready trajectories.")] = 100_000,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that Status tells of.")] = 1000,
    runs: Annotated[_Series | None, typer.Option(min=1, help="Idle runs; repeat it.")] = None,
    processes: Annotated[_Series | None, typer.Option(min=1, help="Server processes; repeat it.")] = None,
    resident_mib: Annotated[
        _Series | None, typer.Option(min=1, help="Payloads in a Redis that is killed; repeat it.")
    ] = None,
    as_json: AsJson = False,
    write: WriteFolder = None,
) -> None:
    """What the data plane costs: pushes, batches, leases, idle streams, and how that grows.

    Beside a raw gRPC stream of the same bytes, raw Redis and the published system's buffer. Status 1: a target was
    missed. Use a quiet machine.
    """
    require_known(only or (), SECTIONS)
    sizes = PlaneSizes(
        tokens=tuple(tokens or (256, 2048, 16_384)),
        batch_groups=batch_groups,
        batches=batches,
        rounds=rounds,
        leases=leases,
        streams=tuple(sorted(streams or (100, 1000))),
        idle_s=idle_seconds,
        backlog=tuple(sorted(backlog or (1000, 10_000, 100_000, 1_000_000))),
        open_groups=tuple(sorted(open_groups or (100, 1000, 10_000))),
        ready=ready,
        nodes=nodes,
        runs=tuple(sorted(runs or (1, 10, 100))),
        processes=tuple(sorted(processes or (1, 2, 4))),
        resident_mib=tuple(sorted(resident_mib or (64, 256, 1024))),
    )
    _measure(sizes, only or list(SECTIONS), as_json=as_json, write=write)


def _measure(sizes: PlaneSizes, only: list[str], *, as_json: bool, write: Path | None) -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="astraflow-dataflow-") as folder:
        chosen = [name for name in SECTIONS if name in only]
        figures = asyncio.run(measure(sizes, sections=chosen, folder=Path(folder), say=say))
    show(figures, [load_note(load)], page=_PAGE, title="Data plane", as_json=as_json, write=write)
