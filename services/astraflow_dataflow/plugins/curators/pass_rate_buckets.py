"""The curator that proposes problems by how often they were solved: a share of each bucket of pass rates."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from astraflow.plugins import Group, PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.problems import (
    averaged,
    chance,
    concerns,
    problem_key,
    solved_share,
)


class PassRateBuckets:
    """Proposes the share `shares[b]` of tasks whose problem's pass rate is in bucket b, and all that are new.

    The first bucket is below `edges[0]`, the last from the last edge on.
    """

    def __init__(
        self,
        state: PluginState,
        seed: int,
        *,
        edges: tuple[float, ...] = (0.05, 0.95),
        shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 1.0, 0.1),
        memory: Annotated[float, Field(ge=0, lt=1)] = 0.5,
        solved_above: float = 0.0,
        problem: str = "problem",
        role: str = "",
    ) -> None:
        """`memory` is the weight of the pass rate so far. Raises ValueError unless edges ascend and fit the shares."""
        if len(shares) != len(edges) + 1 or any(low >= high for low, high in pairwise(edges)):
            raise ValueError(
                f"edges {list(edges)} must ascend and make {len(edges) + 1} buckets, shares has {len(shares)}; "
                "give one share more than edges"
            )
        self._state, self._seed, self._edges, self._shares = state, seed, edges, shares
        self._memory, self._solved_above, self._problem, self._role = memory, solved_above, problem, role

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Return the share of each bucket, by chance."""
        return [task for task in tasks if chance(self._seed, "buckets", task.task_id) < self._share(task)]

    def observe(self, group: Group) -> None:
        """Move the problem's pass rate; that of its first group is what it starts from."""
        if concerns(group, role=self._role):
            key = problem_key(group.task, field=self._problem)
            rate = solved_share(group, above=self._solved_above)
            self._state[key] = averaged(self._state.get(key, rate), rate, memory=self._memory)

    def _share(self, task: TaskSpec) -> float:
        rate = self._state.get(problem_key(task, field=self._problem))
        return 1.0 if rate is None else self._shares[bisect_right(self._edges, rate)]
