"""GRESO, arXiv 2506.02177: problems whose last groups taught nothing are rolled out less often.

A group of equal rewards has no advantage. A problem with z of them in a row is proposed with probability
max(base^z, floor); the base of easy (all solved) and of hard problems follows the share of such groups, version by
version, once every problem had its chance. Its state is one count per problem whose last group taught nothing.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from pydantic import Field

from astraflow.plugins import Group, PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.problems import (
    Tally,
    chance,
    concerns,
    patient,
    problem_key,
)

_EQUAL = 1e-8
_LEAST, _MOST = 0.01, 0.99

Share = Annotated[float, Field(ge=0, le=1)]


class Greso:
    """Skips a problem the more likely, the longer its groups have had equal rewards."""

    def __init__(
        self,
        state: PluginState,
        seed: int,
        tasks_per_epoch: int | None = None,
        *,
        base: Share = 0.5,
        easy_target: Share = 0.083,
        hard_target: Share = 0.167,
        change: Share = 0.01,
        easy_floor: Share = 0.1,
        hard_floor: Share = 0.4,
        easy_above: float = 0.5,
        warmup_tasks: Annotated[int, Field(ge=0)] | None = None,
        problem: str = "problem",
        role: str = "",
    ) -> None:
        """`base` is what both bases start from. A base falls by `change` when the share of its groups among those of a
        version is at least its target, and else rises. Groups of equal rewards are easy above `easy_above`.

        Bases stay until `warmup_tasks` were drawn after a version was trained: an epoch of the data set, if it says how
        long that is, or else for ever. In the first epoch most groups are the first of their problem, so their share
        says nothing of skipping.
        """
        self._state, self._seed, self._base, self._change = state, seed, base, change
        self._targets = {"easy": easy_target, "hard": hard_target}
        self._floors = {"easy": easy_floor, "hard": hard_floor}
        self._easy_above, self._problem, self._role = easy_above, problem, role
        self._warmup = tasks_per_epoch if warmup_tasks is None else warmup_tasks

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Return those that are worth another group, by chance."""
        tally = Tally(self._state)
        counts, bases = tally.before(tasks), self._bases()
        chosen = []
        for task in tasks:
            drawn = chance(self._seed, "greso", task.task_id)
            if patient(counts, wanted=drawn < self._probability(task, bases)):
                chosen.append(task)
        if self._version > 0:
            counts["drawn"] = counts.get("drawn", 0) + len(tasks)
        tally.keep(tasks, counts)
        return chosen

    def observe(self, group: Group) -> None:
        """Count the problem's groups of equal rewards, and move the bases when a version is over."""
        if not concerns(group, role=self._role) or len(group.rewards) < 2:
            return
        key = problem_key(group.task, field=self._problem)
        kind = self._kind(group)
        before = self._state.pop(key, ["", 0])
        if kind:
            self._state[key] = [kind, before[1] + 1 if before[0] == kind else 1]
        self._count(kind, version=group.newest_version)

    def _probability(self, task: TaskSpec, bases: dict[str, float]) -> float:
        kind, streak = self._state.get(problem_key(task, field=self._problem), ["", 0])
        return max(bases[kind] ** streak, self._floors[kind]) if kind else 1.0

    def _kind(self, group: Group) -> str:
        """`easy` or `hard` for equal rewards, empty for others."""
        if max(group.rewards) - min(group.rewards) > _EQUAL:
            return ""
        return "easy" if fmean(group.rewards) > self._easy_above else "hard"

    @property
    def _version(self) -> int:
        """The newest of which a group was observed."""
        return int(self._state.get("window", {"version": 0})["version"])

    def _is_warm(self) -> bool:
        return self._warmup is not None and Tally(self._state).newest().get("drawn", 0) >= self._warmup

    def _bases(self) -> dict[str, float]:
        bases: dict[str, float] = self._state.get("bases", dict.fromkeys(self._targets, self._base))
        return bases

    def _count(self, kind: str, *, version: int) -> None:
        counts = self._state.get("window", {"version": version, "groups": 0, "easy": 0, "hard": 0})
        if version > counts["version"]:
            if self._is_warm():
                self._state["bases"] = {
                    name: _moved(
                        base, self._change, down=counts[name] / counts["groups"] >= self._targets[name]
                    )
                    for name, base in self._bases().items()
                }
            counts = {"version": version, "groups": 0, "easy": 0, "hard": 0}
        counts["groups"] += 1
        if kind:
            counts[kind] += 1
        self._state["window"] = counts


def _moved(base: float, change: float, *, down: bool) -> float:
    return round(min(_MOST, max(_LEAST, base - change if down else base + change)), 6)
