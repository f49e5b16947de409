"""What a batch needs of its groups: different tasks, different sources, rewards that differ (`dataflow.batch_needs`).

Pure. Of the ready groups those are taken that meet the needs, the nearest deadlines first; where they cannot, the batch
waits, unless no other group is to come or it has waited long enough. Called by binding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from astraflow.plugins import ReadyGroup
from astraflow.recipe.groups import BatchNeedsSettings
from astraflow_dataflow.records import Candidates, Selection


@dataclass
class _Tally:
    """What the groups of a batch have."""

    needs: BatchNeedsSettings
    tasks: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)
    signal: int = 0

    def gain(self, group: ReadyGroup) -> int:
        """How many needs that are not met the group helps."""
        return (
            (group.task_id not in self.tasks and len(self.tasks) < self.needs.min_tasks)
            + (group.source not in self.sources and len(self.sources) < self.needs.min_sources)
            + (has_signal(group) and self.signal < self.needs.min_signal)
        )

    def add(self, group: ReadyGroup) -> None:
        self.tasks.add(group.task_id)
        self.sources.add(group.source)
        self.signal += has_signal(group)

    def lack(self) -> str:
        """What is missing, for people; empty when nothing is."""
        figures = (
            (len(self.tasks), self.needs.min_tasks, "tasks"),
            (len(self.sources), self.needs.min_sources, "sources"),
            (self.signal, self.needs.min_signal, "groups of unequal rewards"),
        )
        return ", ".join(f"{have} of {least} {what}" for have, least, what in figures if have < least)


def has_signal(group: ReadyGroup) -> bool:
    """Whether the rewards of the group differ."""
    return len(set(group.rewards)) > 1


def suited(
    ready: Candidates,
    groups: Sequence[ReadyGroup],
    needs: BatchNeedsSettings,
    *,
    num_groups: int,
    chosen: Selection | None,
) -> Selection | None:
    """Return what the batch is bound of: what a selector has chosen, else the best choice here; `lack` while it waits
    for other groups. None takes the nearest deadlines.
    """
    if chosen is not None and chosen.mode != "take":
        return chosen
    by_id = {group.group_id: group for group in groups}
    picked = [by_id[group_id] for group_id in chosen.chosen] if chosen else pick(groups, needs, num_groups)
    tally = _Tally(needs)
    for group in picked:
        tally.add(group)
    if not (lack := tally.lack()):
        return Selection(mode="take", chosen=tuple(group.group_id for group in picked))
    if ready.more_come and ready.lacked_s < needs.max_wait_s:
        return Selection(mode="lack", detail=f"the ready groups have {lack}")
    return chosen


def pick(groups: Sequence[ReadyGroup], needs: BatchNeedsSettings, num_groups: int) -> list[ReadyGroup]:
    """Return so many groups, in the order given: first those that help most needs, then any."""
    tally, taken = _Tally(needs), set[str]()
    for least in (3, 2, 1, 0):
        for group in groups:
            if len(taken) < num_groups and group.group_id not in taken and tally.gain(group) >= least:
                taken.add(group.group_id)
                tally.add(group)
    return [group for group in groups if group.group_id in taken]
