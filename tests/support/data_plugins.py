"""Curators, filters and selectors named in the recipes of `tests/integration/test_data_plugins.py`."""

from collections.abc import Sequence
from dataclasses import replace

from astraflow.plugins import Group, PluginState, ReadyGroup, StepRequest, TaskSpec
from support.dataflow_world import Counting


class SkipSeen:
    """Proposes odd tasks first, and none whose index was observed, to the modulus, `times` times."""

    def __init__(self, state: PluginState, modulus: int = 4, times: int = 1) -> None:
        self.state, self.modulus, self.times = state, modulus, times

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Those that were not seen so often."""
        wanted = [task for task in tasks if self.state.get(self._key(task), 0) < self.times]
        return sorted(wanted, key=lambda task: self._number(task) % 2 == 0)

    def observe(self, group: Group) -> None:
        """Count it."""
        self.state[self._key(group.task)] = self.state.get(self._key(group.task), 0) + 1

    def _number(self, task: TaskSpec) -> int:
        return int(str(task.data["id"]).rpartition("-")[2])

    def _key(self, task: TaskSpec) -> str:
        return str(self._number(task) % self.modulus)


class SkipAll:
    """Wants no task."""

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """None."""
        return ()

    def observe(self, group: Group) -> None:
        """Learns nothing."""


class EveryOther:
    """A stateful filter: keeps the first group, the third, and so on."""

    def __init__(self, state: PluginState) -> None:
        self.state = state

    def __call__(self, group: Group) -> bool:
        """By the number of groups so far."""
        self.state["groups"] = self.state.get("groups", 0) + 1
        return bool(self.state["groups"] % 2)


class LastFirst:
    """Newest arrivals first, and only when `at_least` groups are ready."""

    def __init__(self, at_least: int = 1) -> None:
        self.at_least = at_least

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """The last ones, or none yet."""
        if len(candidates) < self.at_least:
            return []
        newest = sorted(candidates, key=lambda group: -group.arrival)
        return [group.group_id for group in newest[: request.num_groups]]


class Plain(Counting):
    """A data set whose ids begin like nobody's."""

    def train(self, index: int) -> TaskSpec | None:
        """The same tasks, by other names."""
        spec = super().train(index)
        return spec and replace(spec, task_id=f"plain-{index}")


class FourTasks(Counting):
    """Four tasks, which it says and does not enforce."""

    def __len__(self) -> int:
        return 4
