"""Task data that lies in files: rows read with errors that name file and line, and a data set made of rows.

Invariant: no row is trained on and held out; every epoch has each training row once, in an order of its own that
follows from seed and epoch alone. Used by data sets of recipes; standard library only.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from astraflow.errors import RecipeError
from astraflow.plugins import TaskSpec

__all__ = ["RowTasks", "read_rows"]

R = TypeVar("R")


def read_rows(path: Path, *, fields: Mapping[str, type], remedy: str) -> list[dict[str, Any]]:
    """Rows of a JSON lines file, `path` or `path.gz`; each has at least `fields`, of these types, and lists with an
    item. What files call by different names, `prompt|text`, has the first of them in the rows.

    Raises RecipeError: with `remedy`, a command that brings the data, where there is no such file, or it is damaged;
    with file and line for a row that is malformed.
    """
    packed = path if path.suffix == ".gz" else Path(f"{path}.gz")
    found = next((each for each in (path, packed) if each.is_file()), None)
    if found is None:
        raise RecipeError(f"there is no file {path.absolute()} (or .gz): {remedy}")
    opened = gzip.open if found.suffix == ".gz" else open
    try:
        with opened(found, "rt", encoding="utf-8") as lines:
            numbered = ((f"{found}:{at}", line) for at, line in enumerate(lines, start=1) if line.strip())
            rows = [_row(line, place=place, fields=fields) for place, line in numbered]
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise RecipeError(f"{found} cannot be read ({type(error).__name__}: {error}): {remedy}") from error
    if not rows:
        raise RecipeError(f"{found} has no rows: {remedy}")
    return rows


def _row(line: str, *, place: str, fields: Mapping[str, type]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecipeError(f"{place}: not JSON ({error}); a row is one JSON object on one line") from error
    if not isinstance(row, dict):
        raise RecipeError(f"{place}: a {type(row).__name__}; a row is one JSON object")
    for names, kind in fields.items():
        name = next((each for each in names.split("|") if each in row), None)
        if name is None:
            raise RecipeError(f"{place}: no {names!r}; the row has {', '.join(row) or 'nothing'}")
        if not isinstance(row[name], kind) or row[name] == []:
            wanted = "a list with an item" if kind is list else f"a {kind.__name__}"
            raise RecipeError(f"{place}: {name!r} is {row[name]!r}; give {wanted}")
        row[names.partition("|")[0]] = row[name]
    return row


class RowTasks(Generic[R]):
    """A data set of rows; a subclass says with `task` what one of them asks.

    Training tasks of one row have the same `data["problem"]`, its number if `task` gives none, by which curators know
    it again in another epoch.
    """

    def __init__(self, *, train: Sequence[R], heldout: Sequence[R], seed: int) -> None:
        self._train, self._heldout = train, heldout
        self._order = lru_cache(maxsize=2)(lambda epoch: _shuffled(len(train), seed=f"{seed}/{epoch}"))

    def task(self, task_id: str, row: R) -> TaskSpec:
        """Return the task that a row asks."""
        raise NotImplementedError

    def train(self, index: int) -> TaskSpec | None:
        """Return training task `index`: without end, epoch after epoch; None where no row is for training."""
        if not self._train:
            return None
        epoch, place = divmod(index, len(self._train))
        number = self._order(epoch)[place]
        spec = self.task(f"train-{index}", self._train[number])
        return replace(spec, data={"problem": number, **spec.data})

    @property
    def tasks_per_epoch(self) -> int | None:
        """Training tasks of an epoch; None where no row is for training."""
        return len(self._train) or None

    def heldout(self, index: int) -> TaskSpec | None:
        """Return held-out task `index`; None behind the last."""
        return self.task(f"heldout-{index}", self._heldout[index]) if index < len(self._heldout) else None


def _shuffled(number: int, *, seed: str) -> list[int]:
    return random.Random(seed).sample(range(number), number)
