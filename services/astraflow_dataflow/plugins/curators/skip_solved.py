"""The curator that leaves out problems that are nearly always solved. Its state is one average per problem."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from astraflow.plugins import Group, PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.problems import averaged, concerns, problem_key, solved_share


class SkipSolved:
    """Skips a problem while the moving average of its solved share, which starts at 0, is at least `threshold`."""

    def __init__(
        self,
        state: PluginState,
        *,
        threshold: Annotated[float, Field(gt=0, le=1)] = 0.95,
        memory: Annotated[float, Field(ge=0, lt=1)] = 0.9,
        solved_above: float = 0.0,
        problem: str = "problem",
        role: str = "",
    ) -> None:
        """`memory` is the weight of the average so far; a sample is solved with a reward above `solved_above`."""
        self._state, self._threshold, self._memory = state, threshold, memory
        self._solved_above, self._problem, self._role = solved_above, problem, role

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Return those whose problems are not solved yet."""
        return [task for task in tasks if self._state.get(self._key(task), 0.0) < self._threshold]

    def observe(self, group: Group) -> None:
        """Move the problem's average."""
        if concerns(group, role=self._role):
            key, solved = self._key(group.task), solved_share(group, above=self._solved_above)
            self._state[key] = averaged(self._state.get(key, 0.0), solved, memory=self._memory)

    def _key(self, task: TaskSpec) -> str:
        return problem_key(task, field=self._problem)
