"""Foreign plug-ins as the server calls them: each has its Protocol, and asks the process of its run.

Called in the threads of `host`. A state is the server's, as that of any plug-in; a process is sent it when it knows
another one, and answers with what a call changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from astraflow.errors import PluginError
from astraflow.plugins import Group, MeasuredStep, PluginState, ReadyGroup, StepRequest, TaskSpec
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.runs.foreign import messages
from astraflow_dataflow.runs.foreign.frames import Frame
from astraflow_dataflow.runs.foreign.host import PluginHost
from astraflow_dataflow.runs.foreign.process import PluginOrder, PluginProcess
from astraflow_dataflow.settings import PluginLimits

_MAX_TASK_BYTES = 4 * 2**20


class SharedState(PluginState):
    """A state of which the process knows a copy."""

    known_to: PluginProcess | None = None

    def replace(self, entries: Mapping[str, bytes]) -> None:
        """Hold exactly these values, which no process knows yet."""
        super().replace(entries)
        self.known_to = None

    def merge(self, changes: Mapping[str, bytes]) -> None:
        """Take what a call of the process changed; what breaks a bound makes the two differ."""
        process, self.known_to = self.known_to, None
        super().merge(changes)
        self.known_to = process


@dataclass
class ForeignPlugin:
    """One plug-in in the process of its run."""

    host: PluginHost
    kind: str
    name: str
    state: SharedState | None = None

    def ask(self, call: str, frame: Frame, *, about: str = "", once_more: Frame | None = None) -> Frame:
        """Make a call, told from others by what it is about, with `once_more` where a process did not answer.

        Raises PluginError with what it raised, or that it did not answer; UnavailableError.
        """
        head = {"call": call, "kind": self.kind, "name": self.name}
        state = self.state

        def known(process: PluginProcess, num_unanswered: int) -> Frame:
            asked = (once_more if num_unanswered else None) or frame
            asked = Frame({**asked.head, **head}, asked.parts)
            if state is None or state.known_to is process:
                return asked
            state.known_to = process
            return messages.with_entries(asked, "entries", state.encoded())

        answer, changes = messages.split_entries(
            self.host.call(self.kind, self.name, known, about=f"{call} {about}"), "changes"
        )
        if state is not None:
            state.merge(changes)
        if raised := answer.head.get("raised"):
            raise PluginError(str(raised))
        return answer


class ForeignDataset(ForeignPlugin):
    """A data set."""

    @property
    def tasks_per_epoch(self) -> int | None:
        """As the data set says."""
        told: int | None = self.host.facts["dataset"]["tasks_per_epoch"]
        return told

    def name_of(self, method: str) -> str:
        """`module.Class.method`, as its author would look for it."""
        return str(self.host.facts["dataset"]["names"][method])

    def train(self, index: int) -> TaskSpec | None:
        """Return a training task."""
        return next(iter(self.draw("train", start=index, count=1)[0]), None)

    def heldout(self, index: int) -> TaskSpec | None:
        """Return a held-out task."""
        return next(iter(self.draw("heldout", start=index, count=1)[0]), None)

    def draw(self, method: str, *, start: int, count: int) -> tuple[list[TaskSpec], bool]:
        """Return (tasks from index `start`, whether the data set ended); fewer where more would take too long."""
        seconds = self.host.limits.call_timeout_s
        fields = {"method": method, "start": start, "count": count, "seconds": seconds}
        # One task at least, where the whole draw did not come: then what is before the fault is not lost.
        answer = self.ask(
            "draw", Frame(fields), about=f"{method} {start}", once_more=Frame({**fields, "count": 1})
        )
        if largest := max((len(part) for part in answer.parts if len(part) > _MAX_TASK_BYTES), default=0):
            raise PluginError(
                f"the data set's {self.name_of(method)} gave a task of {largest} bytes, at most {_MAX_TASK_BYTES}"
            )
        return messages.tasks_of(answer), answer.head["ended"] is True


class ForeignFilter(ForeignPlugin):
    """A filter."""

    def __call__(self, group: Group) -> bool:
        """Ask about a group."""
        return self.ask("filter", messages.group_frame(group), about=group.group_id).head["kept"] is True


class ForeignMeasuringFilter(ForeignFilter):
    """A filter that learns from what was trained on."""

    def measured(self, step: MeasuredStep) -> None:
        """Tell it of a step."""
        self.ask("measured", messages.step_frame(step))


class ForeignCurator(ForeignPlugin):
    """A curator."""

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Ask which tasks to roll out; one that was not drawn comes back with nothing but its id."""
        given = {task.task_id: task for task in tasks}
        chosen = self.ask("propose", messages.tasks_frame(tasks)).head["chosen"]
        return [given.get(task_id) or TaskSpec(str(task_id), ()) for task_id in chosen]

    def observe(self, group: Group) -> None:
        """Tell it of a group."""
        self.ask("observe", messages.group_frame(group), about=group.group_id)


class ForeignSelector(ForeignPlugin):
    """A selector."""

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Ask which groups a batch gets."""
        return list(self.ask("select", messages.candidates_frame(candidates, request)).head["chosen"])


_CLASSES = {"filter": ForeignFilter, "curator": ForeignCurator, "selector": ForeignSelector}


@dataclass(frozen=True)
class ForeignPlugins:
    """Those of a run, each kind in a process of its own."""

    hosts: Mapping[str, PluginHost]

    @classmethod
    async def start(
        cls, orders: Mapping[str, PluginOrder], limits: PluginLimits, faults: PluginFaults
    ) -> Self:
        """Make them. Raises PluginError."""
        hosts = dict[str, PluginHost]()
        try:
            for kind, order in orders.items():
                if "dataset" in hosts:
                    told = hosts["dataset"].facts["dataset"]["tasks_per_epoch"]
                    order = replace(order, tasks_per_epoch=told)
                hosts[kind] = PluginHost(order, limits, faults)
                await hosts[kind].start()
        except BaseException:
            await cls(hosts).close()
            raise
        return cls(hosts)

    async def close(self) -> None:
        """End their processes."""
        await asyncio.gather(*(host.close() for host in self.hosts.values()))

    @property
    def names(self) -> list[tuple[str, str, int]]:
        """Kind, name and place of each."""
        return [plugin for host in self.hosts.values() for plugin in host.order.plugins]

    def find(self, kind: str, name: str) -> ForeignPlugin | None:
        """Return what asks a plug-in; None for one that the server makes itself."""
        if (kind, name) not in [(each, known) for each, known, _ in self.names]:
            return None
        host = self.hosts[kind]
        if kind == "dataset":
            return ForeignDataset(host, kind, name)
        facts = host.facts[f"{kind} {name}"]
        made = ForeignMeasuringFilter if kind == "filter" and facts["measures"] else _CLASSES[kind]
        return made(host, kind, name, SharedState() if facts["state"] else None)
