"""The file of a study: one JSON line for each cell that ran, with its whole configuration.

Invariant: a line is a cell that ran with the recipe that the line holds; of several of one cell the last counts. A line
cut short by a kill is removed, a run that failed runs again; a cell whose recipe is another one today is refused, never
mixed with the old ones. `running` appends.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from astraflow.errors import ConflictError, IncompatibleError
from astraflow_bench.studies.study import Cell, Measured, Result
from astraflow_kit.log_files import drop_cut_line
from astraflow_launcher.view.metrics_file import to_json


class Ledger:
    """The cells of a study that ran, in `path`. Raises IncompatibleError for a line that is none."""

    def __init__(self, path: Path) -> None:
        drop_cut_line(path)
        self._path = path
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
            elif change := _difference(found.recipe, cell.resolved()):
                raise ConflictError(
                    f"{self._path} has {cell.name} with {change}; give another --out, the same options as then, or "
                    "delete its line"
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


def _difference(then: str, now: str) -> str:
    """The first key in which two resolved recipes differ; empty where none does."""
    yaml = YAML(typ="safe")
    old, new = (dict(_flat(yaml.load(text))) for text in (then, now))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            return f"{key} {old.get(key)!r}, and it would be {new.get(key)!r} now"
    return ""


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - YAML
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{prefix}.{name}" if prefix else str(name))
