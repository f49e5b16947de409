"""Leased tasks: what their filters will be asked about, so that who has all of one need not ask Redis for it.

Pure, and in memory: a task that another process leased, or that was dropped here for room, is judged once it is
complete. Fed by leasing, asked by settling.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from astraflow.rollout.v1 import task_pb2, trajectory_pb2

_MOST_BYTES = 8 * 2**20
"""Of specifications; the tasks that were leased longest ago go first."""


@dataclass(frozen=True, kw_only=True)
class LeasedTask:
    """A task of which nothing had come when it was leased."""

    attempt: int
    group_size: int
    spec: bytes
    """Its serialized Task."""

    def is_all(self, episodes: Sequence[trajectory_pb2.Episode]) -> bool:
        """Return whether these are finished episodes of this attempt by one node, and alike, one for each member."""
        first, members = episodes[0], [episode.member for episode in episodes]
        return sorted(members) == list(range(self.group_size)) and all(
            episode.attempt == self.attempt
            and episode.node_id == first.node_id
            and len(episode.trajectories) == len(first.trajectories)
            and episode.status == trajectory_pb2.EPISODE_STATUS_FINISHED
            and not episode.hedge
            for episode in episodes
        )


WholeTask: TypeAlias = tuple[LeasedTask, Sequence[trajectory_pb2.Episode]]
"""A task with all of its episodes."""


@dataclass
class LeasedTasks:
    """The training tasks that this process leased last, until they come."""

    most_bytes: int = _MOST_BYTES
    _tasks: OrderedDict[str, LeasedTask] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def note(self, lease: task_pb2.Lease) -> None:
        """Keep a task that is leased. It is forgotten when some of it came already, or not all of its roles have
        credit.
        """
        task = lease.task
        self._forget(task.task_id)
        if lease.hedge or lease.uncredited_roles or len(lease.members) != task.group_size:
            return
        if task.purpose == task_pb2.PURPOSE_EVALUATION:
            return
        leased = LeasedTask(attempt=lease.attempt, group_size=task.group_size, spec=task.SerializeToString())
        self._tasks[task.task_id] = leased
        self._bytes += len(leased.spec)
        while self._bytes > self.most_bytes:
            self._forget(next(iter(self._tasks)))

    def take_whole(self, episodes: Sequence[trajectory_pb2.Episode]) -> list[WholeTask]:
        """Return the tasks that these episodes are all of, nothing where others are among them. A task of which
        something came is known no longer.
        """
        of_task: dict[str, list[trajectory_pb2.Episode]] = {}
        for episode in episodes:
            of_task.setdefault(episode.task_id, []).append(episode)
        known = [(self._forget(task_id), own) for task_id, own in of_task.items()]
        whole: list[WholeTask] = [(leased, own) for leased, own in known if leased and leased.is_all(own)]
        return whole if len(whole) == len(known) else []

    def _forget(self, task_id: str) -> LeasedTask | None:
        leased = self._tasks.pop(task_id, None)
        if leased is not None:
            self._bytes -= len(leased.spec)
        return leased
