"""A benchmark of figures: its table, its JSON, its page of results, its status.

Called by the commands whose benchmarks are rows of `Figure`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from astraflow_bench.figures import Figure
from astraflow_bench.machine import Origin


def load_note(before: float) -> str:
    """How busy the machine was, for readers of what a clock says; `before` is its load average before."""
    return f"load average before: {before:.1f}, after: {os.getloadavg()[0]:.1f}"


def show(
    figures: Sequence[Figure],
    notes: Sequence[str],
    *,
    page: str,
    title: str,
    as_json: bool,
    write: Path | None,
) -> None:
    """Print what was found, and write `page`.json and .md to the folder `write`; status 1 when a target was missed."""
    origin = Origin.here()
    rows = [dataclasses.asdict(figure) | {"met": figure.met} for figure in figures]
    found = {"figures": rows, "notes": list(notes), "origin": dataclasses.asdict(origin)}
    text = json.dumps(found, indent=1)
    table = "\n".join([*figure_rows(figures), "", *(f"* {note}" for note in notes)])
    if write is not None:
        link = f"../bench.md#{title.lower().replace(' ', '-')}"
        head = f"# {title}\n\nWritten by `astraflow bench {page}`; [what the rows mean]({link}).\n"
        place = f"* machine: {origin.machine}\n* date: {origin.date}, commit {origin.commit}"
        (write / f"{page}.json").write_text(f"{text}\n")
        (write / f"{page}.md").write_text(f"{head}\n{place}\n\n{table}\n")
    typer.echo(text if as_json else table)
    if any(figure.met is False for figure in figures):
        raise typer.Exit(1)


def require_known(only: Iterable[str], sections: Iterable[str]) -> None:
    """Raise BadParameter when `--only` names what is no section."""
    if unknown := set(only) - set(sections):
        raise typer.BadParameter(
            f"{', '.join(unknown)} is none of {', '.join(sections)}", param_hint="--only"
        )


def say(text: str) -> None:
    """Tell the person who waits what is measured now."""
    sys.stderr.write(f"{text}\n")


def figure_rows(figures: Sequence[Figure]) -> list[str]:
    """The lines of a Markdown table."""
    rows = ["| figure | subject | value | target | met |", "|---|---|---|---|---|"]
    for figure in figures:
        value = _shown(figure.value)
        least, most = figure.least, figure.most
        target = f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else ""
        met = {True: "yes", False: "**no**", None: ""}[figure.met]
        rows.append(f"| {figure.what} | {figure.subject} | {value} {figure.unit} | {target} | {met} |")
    return rows


def _shown(value: float | None) -> str:
    if value is None:
        return "unmeasured:"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
