"""AdaRFT, arXiv 2504.05520: tasks of the difficulty at which the policy solves a wanted share of samples.

Tasks say how difficult they are in `data`. The difficulty asked for moves by step · tanh(sensitivity · (R − success)),
where R is the solved share of the last groups: up while the policy succeeds more than wanted. Its state is two
numbers.
"""

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from astraflow.plugins import Group, PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.problems import Tally, concerns, patient, solved_share


class DifficultyCurriculum:
    """Skips tasks further than `width` from the difficulty asked for."""

    def __init__(
        self,
        state: PluginState,
        *,
        success: Annotated[float, Field(ge=0, le=1)] = 0.5,
        sensitivity: Annotated[float, Field(gt=0)] = 2.0,
        step: Annotated[float, Field(gt=0)] = 50.0,
        width: Annotated[float, Field(gt=0)] = 10.0,
        lowest: float = 0.0,
        highest: float = 100.0,
        groups: Annotated[int, Field(ge=1)] = 64,
        solved_above: float = 0.0,
        difficulty: str = "difficulty",
        role: str = "",
    ) -> None:
        """The difficulty asked for starts at `lowest`, stays up to `highest` and moves after each `groups` groups."""
        self._state, self._success, self._sensitivity, self._step = state, success, sensitivity, step
        self._width, self._lowest, self._highest, self._groups = width, lowest, highest, groups
        self._solved_above, self._difficulty, self._role = solved_above, difficulty, role

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Return those near the difficulty asked for. Raises KeyError for a task without a difficulty."""
        tally, asked = Tally(self._state), self._state.get("difficulty", self._lowest)
        counts = tally.before(tasks)
        chosen = [
            task
            for task in tasks
            if patient(counts, wanted=abs(float(task.data[self._difficulty]) - asked) <= self._width)
        ]
        tally.keep(tasks, counts)
        return chosen

    def observe(self, group: Group) -> None:
        """Count it, and move the difficulty when there are enough."""
        if not concerns(group, role=self._role):
            return
        number, solved = self._state.get("observed", [0, 0.0])
        number, solved = number + 1, solved + solved_share(group, above=self._solved_above)
        if number == self._groups:
            self._state["difficulty"] = self._moved(solved / number)
            number, solved = 0, 0.0
        self._state["observed"] = [number, solved]

    def _moved(self, solved: float) -> float:
        asked = self._state.get("difficulty", self._lowest)
        asked += self._step * math.tanh(self._sensitivity * (solved - self._success))
        return float(min(self._highest, max(self._lowest, asked)))
