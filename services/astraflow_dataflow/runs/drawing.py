"""Drawing: tasks of a data set by index, up to its end or to where it fails.

Used by the server for data sets in its own process, and by the process of a run's foreign plug-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import wraps

from astraflow.errors import PluginError
from astraflow.plugins import Dataset, TaskSpec
from astraflow_kit.plugins import RAISED, describe


def training_tasks(dataset: Dataset) -> Callable[[int], TaskSpec | None]:
    """Return the data set's `train`, ended where its length, if it has one, says."""

    @wraps(dataset.train)
    def train(index: int) -> TaskSpec | None:
        ended = isinstance(dataset, Sized) and index >= len(dataset)
        return None if ended else dataset.train(index)

    return train


def draw(source: Callable[[int], TaskSpec | None], *, start: int, count: int) -> tuple[list[TaskSpec], bool]:
    """Return (tasks from index `start`, whether the data set ended). Raises PluginError when the plug-in does."""
    specs: list[TaskSpec] = []
    for index in range(start, start + count):
        try:
            spec: object = source(index)
            if not isinstance(spec, TaskSpec | None):
                raise TypeError(f"it returned {type(spec).__name__}, not a TaskSpec or None")
        except RAISED as error:
            if specs:  # they are good work; the next draw begins at the fault
                return specs, False
            raise PluginError(
                f"the data set's {name_of(source)} raised at index {index}: {describe(error)}; mend it, "
                "it is asked again at each sweep"
            ) from error
        if spec is None:
            return specs, True
        specs.append(spec)
    return specs, False


def name_of(source: Callable[[int], TaskSpec | None]) -> str:
    """`module.Class.method`, as its author would look for it."""
    return f"{getattr(source, '__module__', '')}.{getattr(source, '__qualname__', repr(source))}"
