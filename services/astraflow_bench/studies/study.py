"""What a study is: a recipe, arms that each change some of its keys, seeds, and figures that are read from a run.

Invariant: a cell (arm and seed) is nothing but a recipe with overrides, so that whoever has its line can run it again.
`catalogue` names the studies, `running` runs their cells, `page` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean, stdev
from threading import Event
from typing import Any, TypeAlias

import numpy as np

from astraflow.recipe.file import load_recipe
from astraflow.recipe.shipped import shipped_recipes
from astraflow_bench.figures import Figure

Curve: TypeAlias = list[tuple[float, float]]
"""Points (x, y), ascending in x."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a finished run left: its summary, the lines of its metrics file, and those of its nodes' logs."""

    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]

    def of_kind(self, kind: str, policy: str = "") -> list[Mapping[str, Any]]:
        """Its metrics of one kind, of one policy where one is named."""
        return [line for line in self.metrics if line["kind"] == kind and policy in ("", line["policy"])]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one cell yielded. A figure that is not known is None."""

    figures: Mapping[str, float | None]
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting that is compared: `changes` are overrides `key=value`, `{seed}` in them is the cell's seed. A control
    may have fewer `seeds`.
    """

    name: str
    changes: tuple[str, ...] = ()
    seeds: int | None = None
    recipe: str = ""
    """As `Study.recipe`, which it is where it is empty."""

    def is_any_of(self, names: Sequence[str]) -> bool:
        """Whether a name or pattern is that of the arm, or of the folder of its own recipe."""
        return any(fnmatch(own, one) for own in (self.name, self.recipe.split("/")[0]) for one in names)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: an arm with a seed."""

    arm: str
    seed: int
    recipe: str
    """Name of a recipe that comes with the release, or a file in its folder: `math/small.yaml`."""
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """As people read it."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def path(self) -> Path:
        """Where the recipe is."""
        folder, _, file = self.recipe.partition("/")
        return shipped_recipes()[folder] / file

    def resolved(self) -> str:
        """The recipe with every key, as YAML. Raises RecipeError."""
        return load_recipe(self.path, overrides=self.overrides).yaml_text


@dataclass(frozen=True, kw_only=True)
class Result:
    """A cell that ran: one line of the study's file."""

    arm: str
    seed: int
    recipe: str
    """Resolved, as YAML."""
    measured: Measured
    machine: str
    date: str
    commit: str
    load: float
    """Load average of the machine in the last minute of the run."""
    seconds: float
    """Of the whole run by the clock."""
    failed: str = ""
    """Why the run failed, the end of its own words; empty for one that finished."""

    def number(self, figure: str) -> float:
        """A figure; NaN where it is not known."""
        value = self.measured.figures.get(figure)
        return math.nan if value is None else value


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What the picture shows: the curve `curve` of every arm, mean over seeds; or without one a bar of `figure`."""

    title: str
    x: str
    y: str
    curve: str = ""
    figure: str = ""
    each_seed: bool = False
    """A line for each seed instead of their mean."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question with its arms. `conclude` turns what is there into targets; cells may be missing."""

    name: str
    title: str
    intro: str
    recipe: str
    arms: Sequence[Arm]
    base: tuple[str, ...] = ()
    """Overrides of every arm, before its own."""
    measure: Callable[[Run], Measured]
    columns: Mapping[str, str]
    """Heading of each figure that the table has."""
    plot: Plot
    conclude: Callable[[Sequence[Result]], list[Figure]] = lambda results: []
    perform: Callable[[Cell, Path, Event], tuple[dict[str, Any], Path]] | None = None
    """Runs a cell from a folder, until the event is set, and returns its summary and the run's folder; without it
    `running` does.
    """
    page: str = ""
    """Name of its files; the study's where it is empty."""
    lists_seeds: bool = False
    """Whether the page has a row for each seed too."""

    @property
    def stem(self) -> str:
        """Name of its files without an ending."""
        return self.page or self.name

    def cells(
        self, *, seeds: int, only: Sequence[str] = (), steps: int | None = None, overrides: Sequence[str] = ()
    ) -> list[Cell]:
        """Its cells, seed by seed. `only` are names or patterns of arms, or of recipes where each has its own. Raises
        ValueError for one that no arm has.
        """
        if unknown := [one for one in only if not any(arm.is_any_of([one]) for arm in self.arms)]:
            names = ", ".join(arm.name for arm in self.arms)
            raise ValueError(f"{', '.join(unknown)} is no arm of {self.name}; it has {names}")
        given = (*overrides, *((f"run.steps={steps}",) if steps else ()))
        return [
            Cell(
                arm=arm.name,
                seed=seed,
                recipe=arm.recipe or self.recipe,
                overrides=(
                    *(change.replace("{seed}", str(seed)) for change in (*self.base, *arm.changes)),
                    *given,
                    f"run.seed={seed}",
                ),
            )
            for seed in range(seeds)
            for arm in self.arms
            if seed < (seeds if arm.seeds is None else arm.seeds) and (not only or arm.is_any_of(only))
        ]


def heldout_curve(run: Run, policy: str = "") -> Curve:
    """Held-out reward over versions; of two evaluations of one version the final one. One without a sample, because
    nodes had moved on, is left out.
    """
    lines = run.of_kind("evaluation", policy)
    points = {line["version"]: line["heldout_reward"] for line in lines if line["heldout_reward"] is not None}
    return sorted(points.items())


def paired(results: Sequence[Result], arm: str, other: str) -> list[tuple[Result, Result]]:
    """The results of two arms of equal seeds, by seed."""
    first, second = ({one.seed: one for one in results if one.arm == name} for name in (arm, other))
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def error_of(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN of fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def spread(values: Sequence[float]) -> str:
    """Error and number of values, as a table says it."""
    return f"± {error_of(values):.2g} (n {len(values)})" if len(values) > 1 else "(n 1)"


def mean_figure(
    what: str, subject: str, values: Sequence[float], *, least: float | None = None, most: float | None = None
) -> Figure:
    """The mean of some seeds, with its error, as a figure."""
    return Figure(
        what=what, subject=subject, value=fmean(values), unit=spread(values), least=least, most=most
    )


def mean_of(results: Sequence[Result], arm: str, figure: str) -> tuple[float, float, int]:
    """Mean, standard error and number of a figure over the seeds of an arm; NaN where none has it."""
    found = [one.number(figure) for one in results if one.arm == arm]
    known = [value for value in found if not math.isnan(value)]
    return (fmean(known) if known else math.nan), error_of(known), len(known)


def mean_until(curve: Curve, end: float) -> float | None:
    """Return the mean of the curve from 0 to `end`: the trapezoidal rule; None where it ends before."""
    last = curve_at(curve, end)
    if last is None:
        return None
    xs, ys = zip(*[point for point in curve if point[0] < end], (end, last), strict=True)
    return float(np.trapezoid(ys, xs)) / end


def curve_at(curve: Curve, x: float) -> float | None:
    """Return the curve at x; None beyond its ends."""
    xs, ys = zip(*curve, strict=True)
    return float(np.interp(x, xs, ys)) if xs[0] <= x <= xs[-1] else None
