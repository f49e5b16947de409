"""Lengths: how long tasks will be, so that long ones are begun first and hold up nobody at the end.

Pure, and in memory: another process learns anew. Fed by settling, asked by curation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from astraflow.plugins import TaskSpec

_SMOOTHING = 0.1
"""Weight of the newest group in the mean length of a source."""
_MOST_SOURCES = 1024


@dataclass
class Lengths:
    """The mean tokens of a task's trajectories, by source, as far as this process has seen any."""

    _means: dict[str, float] = field(default_factory=dict)

    def note(self, source: str, tokens: Sequence[int]) -> None:
        """Learn from a complete group."""
        if source not in self._means and len(self._means) >= _MOST_SOURCES:
            return
        mean = sum(tokens) / len(tokens)
        before = self._means.get(source, mean)
        self._means[source] = before + _SMOOTHING * (mean - before)

    def longest_first(self, tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
        """Return tasks by the expected length, the longest first and equal ones as they came; an unknown source may be
        as long as any.
        """
        most = max(self._means.values(), default=0.0)
        return sorted(tasks, key=lambda task: -self._means.get(task.source, most))
