"""Several data sets as one: `run.sources` of a recipe.

Invariant: task `index` is a function of the sources, their weights and their ends alone, so any server that asks at any
time gets the same tasks. Made by `data_plugins`, and by whoever needs the data set of a recipe without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property

from astraflow.plugins import Dataset, TaskSpec
from astraflow.recipe import Recipe
from astraflow_kit.plugins import RecipeSource, make

ENDLESS = 2**31
"""A source that has this task has no end here."""


def make_dataset(recipe: Recipe, source: RecipeSource) -> Dataset:
    """Make the recipe's data set, or its sources as one. Raises PluginError."""
    seed, run = recipe.run.seed, recipe.run
    if run.dataset is not None:
        return make(run.dataset, protocol=Dataset, source=source, seed=seed)
    parts = {
        name: Part(make(own.dataset, protocol=Dataset, source=source, seed=seed), weight=own.weight)
        for name, own in run.sources.items()
    }
    return MixedDataset(parts)


def tasks_per_epoch(dataset: Dataset) -> int | None:
    """Return how many training tasks go once through the problems; None where the data set does not say."""
    told: int | None = getattr(dataset, "tasks_per_epoch", None)
    return told


@dataclass(frozen=True)
class Part:
    """One source: `weight` of its tasks in each turn."""

    dataset: Dataset
    weight: int


class MixedDataset:
    """Tasks of all sources in turns: of each as many as its weight, spread over the turn, while it has any.

    A task's id begins with `NAME:`, and its source is NAME, or `NAME/SOURCE` where its data set names one.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = parts

    def train(self, index: int) -> TaskSpec | None:
        """Return training task `index` of the mixture, or None once every source has ended."""
        return self._task(index, self._train, lambda part: part.dataset.train)

    def heldout(self, index: int) -> TaskSpec | None:
        """Return held-out task `index` of the mixture, or None past the end."""
        return self._task(index, self._heldout, lambda part: part.dataset.heldout)

    @property
    def tasks_per_epoch(self) -> int | None:
        """Tasks until every source was gone through; None where one does not say."""
        told = [(tasks_per_epoch(part.dataset), part.weight) for part in self.parts.values()]
        turns = [-(-tasks // weight) for tasks, weight in told if tasks is not None]
        return max(turns) * sum(weight for _, weight in told) if len(turns) == len(told) else None

    def of(self, name: str) -> MixedDataset:
        """Return the tasks of one source."""
        return MixedDataset({name: self.parts[name]})

    @cached_property
    def _train(self) -> Turns:
        return self._turns({name: _train_end(part.dataset) for name, part in self.parts.items()})

    @cached_property
    def _heldout(self) -> Turns:
        return self._turns({name: _end(part.dataset.heldout) for name, part in self.parts.items()})

    def _turns(self, ends: Mapping[str, int]) -> Turns:
        return Turns({name: part.weight for name, part in self.parts.items()}, ends)

    def _task(
        self, index: int, turns: Turns, method: Callable[[Part], Callable[[int], TaskSpec | None]]
    ) -> TaskSpec | None:
        if (place := turns.place(index)) is None:
            return None
        name, own_index = place
        spec = method(self.parts[name])(own_index)
        if spec is None:
            raise ValueError(
                f"source {name!r} has no task {own_index}, but had one before; a data set may not shrink"
            )
        source = f"{name}/{spec.source}" if spec.source else name
        return replace(spec, task_id=f"{name}:{spec.task_id}", source=source)


@dataclass(frozen=True)
class Turns:
    """Which task of which source is task `index` of a mixture. Pure."""

    weights: Mapping[str, int]
    """Tasks of each source in a turn."""
    ends: Mapping[str, int]
    """How many tasks each source has."""

    def place(self, index: int) -> tuple[str, int] | None:
        """Return (source, index in it); None past the end of all."""
        taken = dict.fromkeys(self.weights, 0)
        for turn, times in self._stretches:
            if index < times * len(turn):
                full, position = divmod(index, len(turn))
                name = turn[position]
                own = taken[name] + full * turn.count(name) + turn[:position].count(name)
                return name, own
            index -= times * len(turn)
            for name in set(turn):
                taken[name] += times * turn.count(name)
        return None

    @cached_property
    def _stretches(self) -> list[tuple[Sequence[str], int]]:
        """Turns that are equal and how often they follow each other: at most two for each source that ends."""
        left = dict(self.ends)
        stretches: list[tuple[Sequence[str], int]] = []
        while any(left.values()):
            sizes = {name: min(weight, left[name]) for name, weight in self.weights.items() if left[name]}
            turn = _spread(sizes)
            times = min(left[name] // size for name, size in sizes.items())
            stretches.append((turn, times))
            for name, size in sizes.items():
                left[name] -= times * size
        return stretches


def _spread(sizes: Mapping[str, int]) -> list[str]:
    """Return each name as often as its size, evenly: the k-th of n stands at (k − ½) / n of the turn."""
    places = [((k + 0.5) / size, name) for name, size in sizes.items() for k in range(size)]
    return [name for _, name in sorted(places)]


def _train_end(dataset: Dataset) -> int:
    return len(dataset) if isinstance(dataset, Sized) else _end(dataset.train)


def _end(task: Callable[[int], TaskSpec | None]) -> int:
    """Return how many tasks there are, by doubling and halving; ENDLESS where there are more."""
    high = 1
    while high < ENDLESS and task(high - 1) is not None:
        high *= 2
    low = 0 if high == 1 else high // 2
    if high >= ENDLESS:
        return ENDLESS
    # Task low - 1 exists, task high - 1 does not.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if task(middle - 1) is not None else (low, middle)
    return low
