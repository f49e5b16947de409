"""What `astraflow bench weights` found, as tables for a terminal and as a page of results.

Invariant: both show the same cells, and every figure of the page also stands in the JSON beside it.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from astraflow_bench.machine import Origin
from astraflow_bench.weights.benchmark import Figures, WeightsReport
from astraflow_bench.weights.targets import Target

PAGE = "weights-bench"
_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class _Cells:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_json(report: WeightsReport, targets: Sequence[Target]) -> Figures:
    """All fields; docs/bench.md explains them."""
    return dataclasses.asdict(report) | {"targets": [target.as_json() for target in targets]}


def print_report(report: WeightsReport, targets: Sequence[Target]) -> None:
    """For people, at a terminal."""
    console = Console()
    if not console.is_terminal:
        # Whoever reads it from a file can scroll; cut words cannot be read.
        console = Console(width=_WIDTH)
    console.print(_headline(report) + "\n", highlight=False)
    for cells in _tables(report, targets):
        table = Table(
            *cells.columns,
            title=cells.title,
            box=None,
            padding=(0, 1),
            header_style="dim",
            title_justify="left",
        )
        for row in cells.rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    console.print(_rest(report), highlight=False)


def write_page(
    report: WeightsReport, targets: Sequence[Target], *, folder: Path, origin: Origin, command: str
) -> None:
    """Write `weights-bench.json` and `weights-bench.md` into the folder."""
    content = {"origin": dataclasses.asdict(origin), "command": command, **as_json(report, targets)}
    (folder / f"{PAGE}.json").write_text(json.dumps(content, indent=1) + "\n")
    missed = [target.name for target in targets if not target.met]
    lines = [
        "# What weight versions cost",
        "",
        f"Written by `{command}`; [the fields](../bench.md) are explained there and stand in `{PAGE}.json`.",
        "",
        f"* machine: {origin.machine}",
        f"* date: {origin.date}, commit {origin.commit}",
        f"* {_headline(report)}",
        f"* targets: {len(targets) - len(missed)} of {len(targets)} met"
        + (f"; missed: {'; '.join(missed)}" if missed else ""),
        *(f"* {line}" for line in _rest(report).splitlines()),
    ]
    for cells in _tables(report, targets):
        lines += ["", f"## {cells.title}", "", _row(cells.columns), _row(["---"] * len(cells.columns))]
        lines += [_row(row) for row in cells.rows]
    (folder / f"{PAGE}.md").write_text("\n".join(lines) + "\n")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _headline(report: WeightsReport) -> str:
    return (
        f"{report.num_elements / 1e6:.0f} M weights; {report.kernel}; "
        f"memcpy {report.memcpy_bytes_per_s / 1e9:.1f} GB/s of CPU time"
    )


def _rest(report: WeightsReport) -> str:
    merge, snapshot = report.merge, report.snapshot
    lines = [
        f"merging {merge['span']}: {merge['over_sum']:.3f} of the sum, {merge['merge']:.1f} memcpys, "
        f"applied in {merge['apply_merged']:.1f}",
        f"snapshot: {snapshot['over_safetensors']:.3f} of safetensors, written in {snapshot['encode']:.1f} memcpys, "
        f"read in {snapshot['decode']:.1f}",
        f"verification (xxh3-128 of every tensor): {snapshot['verify']:.2f} memcpys",
    ]
    lines += [
        f"two threads against one, {figures['codec']}: encode {figures['encode']:.2f}, "
        f"decode + apply {figures['decode_apply']:.2f} times as fast"
        for figures in report.two_threads
    ]
    return "\n".join(lines)


def _tables(report: WeightsReport, targets: Sequence[Target]) -> list[_Cells]:
    return [_bytes_cells(report), _expert_cells(report), _cpu_cells(report), _target_cells(targets)]


def _bytes_cells(report: WeightsReport) -> _Cells:
    names = list(report.deltas[0]["bytes_per_change"])
    rows = [
        [
            figures["source"],
            f"{figures['learning_rate']:.3g}",
            f"{100 * figures['density']:.2f} %",
            f"{figures['bound_bytes_per_change']:.3f}",
            f"{figures['context_bound_bytes_per_change']:.3f}",
            *(f"{figures['bytes_per_change'][name]:.3f}" for name in names),
            f"{100 * figures['framing_share']['rice_ctx']:.2f} %",
        ]
        for figures in report.deltas
    ]
    columns = ["source", "learning rate", "density", "bound", "context bound", *names, "framing of rice_ctx"]
    title = "Bytes per changed weight, rice and rice_ctx with the parts' framing, peers without framing"
    return _Cells(title=title, columns=columns, rows=rows)


def _expert_cells(report: WeightsReport) -> _Cells:
    """Two rows per density: all that is stored, and the encoded changes alone."""
    names = list(report.experts[0]["bytes_per_change"])
    rows = [
        [f"{figures['density']:g}", counted, *(f"{figures[field][name]:.2f}" for name in names)]
        for figures in report.experts
        for counted, field in (
            ("with framing", "bytes_per_change"),
            ("without framing", "body_bytes_per_change"),
        )
    ]
    first = report.experts[0]
    title = (
        f"Bytes per changed weight of {first['experts']} experts, {first['touched_tensors']} of whose "
        f"{first['tensors']} tensors are touched"
    )
    return _Cells(title=title, columns=["changed share of a touched tensor", "counted", *names], rows=rows)


def _cpu_cells(report: WeightsReport) -> _Cells:
    rows = []
    for figures in report.cpu:
        decode = figures.get("decode_apply")
        cells = f"{figures['encode']:.1f}", "" if decode is None else f"{decode:.1f}"
        rows.append([figures["codec"], figures["path"], *cells])
    rate = report.cpu[0]["learning_rate"]
    title = f"CPU in memcpys of the model, learning rate {rate:g}"
    return _Cells(title=title, columns=["codec", "path", "encode", "decode + apply"], rows=rows)


def _target_cells(targets: Sequence[Target]) -> _Cells:
    rows = [
        [target.name, f"{target.measured:.3f}", f"{target.limit:.3f}", "met" if target.met else "MISSED"]
        for target in targets
    ]
    return _Cells(title="Targets", columns=["target", "measured", "limit", ""], rows=rows)
