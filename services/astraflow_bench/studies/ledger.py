"""The file of a study: one JSON line for each cell that ran, with its whole configuration.

Invariant: a line is a cell that ran with the recipe that the line holds; of several of one cell the last counts. A line
cut short by a kill is removed, a run that failed runs again; a cell whose recipe is another one today is refused, never
mixed with the old ones. A key that the line's release did not have is a difference too, because what it says by default
may not be what was: whether it is, people know and say. `running` appends.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from astraflow.errors import ConflictError, IncompatibleError, RecipeError
from astraflow.recipe.file import parse_recipe
from astraflow.recipe_changes import differences, settings_of
from astraflow_bench.studies.study import Cell, Measured, Result
from astraflow_kit.log_files import drop_cut_line
from astraflow_launcher.view.metrics_file import to_json


class Ledger:
    """The cells of a study that ran, in `path`. Raises IncompatibleError for a line that is none.

    With `accepts_older` what the recipe of a line lacks counts as its default.
    """

    def __init__(self, path: Path, *, accepts_older: bool = False) -> None:
        drop_cut_line(path)
        self._path, self._accepts_older = path, accepts_older
        self._found = {(one.arm, one.seed): one for one in _read(path)}

    @property
    def results(self) -> list[Result]:
        """All cells that finished, in the order of the file."""
        return [one for one in self._found.values() if not one.failed]

    @property
    def failures(self) -> list[Result]:
        """All cells whose last run failed."""
        return [one for one in self._found.values() if one.failed]

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells that have not finished yet. Raises ConflictError where a line has another recipe than its cell."""
        wanted = []
        for cell in cells:
            found = self._found.get((cell.arm, cell.seed))
            if found is None or found.failed:
                wanted.append(cell)
            elif change := _difference(found.recipe, cell.resolved(), accepts_older=self._accepts_older):
                raise ConflictError(
                    f"{self._path} has {cell.name} {change} another --out, or delete its line"
                )
        return wanted

    def append(self, result: Result) -> None:
        """Write the line of a cell that has just run."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_json(dataclasses.asdict(result)) + "\n")
        self._found[result.arm, result.seed] = result


def _read(path: Path) -> Iterator[Result]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            fields = json.loads(line)
            measured = Measured(**fields.pop("measured"))
            yield Result(measured=measured, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IncompatibleError(
                f"{path}, line {number} is no cell of a study ({error}); restore the file, or give another --out"
            ) from error


def _difference(then: str, now: str, *, accepts_older: bool) -> str:
    """How two resolved recipes differ, and the beginning of the remedy; empty where they do not."""
    if then == now:
        return ""
    try:
        line = parse_recipe(then)
    except RecipeError as error:
        return f"with a recipe that this release refuses ({error}); give"
    for key, (was, would_be) in differences(line.recipe, parse_recipe(now).recipe).items():
        return f"with {key} {was}, and it would be {would_be} now; give the same options as then,"
    lacking = [
        f"{'.'.join(keys)} (now {value})"
        for keys, value in settings_of(line.recipe).items()
        if line.document.origin(keys) is None
    ]
    if accepts_older or not lacking:
        return ""
    return f"of a release without {', '.join(lacking)}; give --accept-older if that changes nothing here,"
