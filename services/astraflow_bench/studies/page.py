"""A study's page: its targets, a table of means over seeds, a picture. Written anew after every run of the command.

Invariant: everything on it comes from the lines of the study's file. Called by `commands.study`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from astraflow_bench.commands.figures_page import figure_rows
from astraflow_bench.figures import Figure
from astraflow_bench.studies.study import Curve, Result, Study, error_of, mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write(
    study: Study, results: Sequence[Result], folder: Path, *, failures: Sequence[Result] = ()
) -> list[Figure]:
    """Write page and picture of what there is; returns the study's figures."""
    figures = study.conclude(results)
    (folder / f"{study.stem}.md").write_text(text_of(study, results, figures, failures=failures))
    _draw(study, results, folder / f"{study.stem}.png")
    return figures


def text_of(
    study: Study, results: Sequence[Result], figures: Sequence[Figure], *, failures: Sequence[Result] = ()
) -> str:
    """The page as Markdown."""
    ran = [*results, *failures]
    measured = [arm.name for arm in study.arms if any(one.arm == arm.name for one in results)]
    lines = [
        f"# {study.title}",
        "",
        f"Written by `astraflow study {study.name}`. {study.intro}",
        "",
        *(f"* machine: {machine}" for machine in dict.fromkeys(one.machine for one in ran)),
        f"* dates: {_joined(one.date for one in ran)}; commits {_joined(one.commit for one in ran)}",
        f"* load average at the end of a run: {_range([one.load for one in ran])}",
        f"* every cell with its whole recipe: [{study.stem}.jsonl]({study.stem}.jsonl)",
        "",
    ]
    if figures:
        lines += [*figure_rows(figures), ""]
    headings = ["arm", "seeds", *study.columns.values()]
    lines += [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for arm in measured:
        num_seeds = sum(one.arm == arm for one in results)
        cells = [_cell(*mean_of(results, arm, figure)) for figure in study.columns]
        lines.append(f"| {' | '.join([arm, str(num_seeds), *cells])} |")
    if study.lists_seeds:
        lines += [
            "",
            f"| {' | '.join(['arm', 'seed', *study.columns.values()])} |",
            "|---" * len(headings) + "|",
        ]
        lines += [_seed_row(study, one) for arm in measured for one in results if one.arm == arm]
    if failures:
        lines += ["", "| failed | seed | reason |", "|---|---|---|"]
        lines += [f"| {one.arm} | {one.seed} | {_one_line(one.failed)} |" for one in failures]
    if missing := [arm.name for arm in study.arms if arm.name not in measured]:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    lines += ["", f"± is the standard error over seeds. ![{study.plot.title}]({study.stem}.png)", ""]
    return "\n".join(lines)


def _cell(mean: float, error: float, count: int) -> str:
    if not count:
        return "–"
    return f"{mean:.3g} ± {error:.2g}" if count > 1 else f"{mean:.3g}"


def _seed_row(study: Study, one: Result) -> str:
    shown = (
        _cell(one.number(figure), math.nan, int(not math.isnan(one.number(figure))))
        for figure in study.columns
    )
    return f"| {' | '.join([one.arm, str(one.seed), *shown])} |"


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _joined(values: object) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))  # type: ignore[attr-defined]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}" if values else "–"


def _draw(study: Study, results: Sequence[Result], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    (_draw_curves if study.plot.curve else _draw_bars)(axes, study, results)
    axes.set(xlabel=study.plot.x, ylabel=study.plot.y, title=study.plot.title)
    axes.grid(alpha=0.3)
    picture.savefig(path, dpi=110)


def _draw_curves(axes: Axes, study: Study, results: Sequence[Result]) -> None:
    for arm in study.arms:
        own = [one.measured.curves.get(study.plot.curve, []) for one in results if one.arm == arm.name]
        if study.plot.each_seed:
            for seed, curve in enumerate(own):
                axes.plot(*zip(*curve, strict=True), marker=".", alpha=0.7, label=f"{arm.name} {seed}")
        elif own:
            _draw_mean(axes, own, label=arm.name)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", ncols=2)


def _draw_mean(axes: Axes, curves: Sequence[Curve], *, label: str) -> None:
    """Mean over the seeds that have a point at an x, with its standard error."""
    points: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            points.setdefault(x, []).append(y)
    xs = sorted(points)
    errors = [error_of(points[x]) for x in xs]
    shown = [0.0 if math.isnan(error) else error for error in errors]
    axes.errorbar(xs, [fmean(points[x]) for x in xs], yerr=shown, marker=".", capsize=2, label=label)


def _draw_bars(axes: Axes, study: Study, results: Sequence[Result]) -> None:
    for number, arm in enumerate(study.arms):
        mean, error, count = mean_of(results, arm.name, study.plot.figure)
        if count:
            axes.bar(number, mean, yerr=None if math.isnan(error) else error, capsize=3)
    axes.set_xticks(range(len(study.arms)), [arm.name for arm in study.arms], rotation=60, ha="right")
