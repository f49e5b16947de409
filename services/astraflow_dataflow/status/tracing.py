"""Tracing: the life of one task, told from the entries that the functions kept.

Pure. An entry is a line of tab-separated fields, its first the kind and its second the time; `store/lua/trace.lua`
writes them. Called by reporting for `Why`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.dataflow.v1 import trace_pb2
from astraflow_dataflow.records import StoredTrace, timestamp
from astraflow_dataflow.rules.groups import group_id
from astraflow_dataflow.store.keys import TRAIN_LANE

MAX_ENTRIES = 4000
"""The bound of `store/lua/trace.lua`; a trace that long may lack its end."""

_STATES = {
    "": trace_pb2.TASK_STATE_FORGOTTEN,
    "queued": trace_pb2.TASK_STATE_QUEUED,
    "leased": trace_pb2.TASK_STATE_LEASED,
    "retry": trace_pb2.TASK_STATE_RETRY,
    "complete": trace_pb2.TASK_STATE_COMPLETE,
    "done": trace_pb2.TASK_STATE_DONE,
}
_KEPT = ("ACCEPTED", "ACCEPTED_LATE")


@dataclass(frozen=True, kw_only=True)
class _Whereabouts:
    """Where a group, and so its trajectories, is."""

    place: trace_pb2.TrajectoryPlace.ValueType
    ms: int
    reason: str = ""
    batch_id: str = ""
    step: int = 0


@dataclass
class _History:
    """What the entries say, while they are read in order."""

    task_id: str
    submit_ms: int = 0
    leases: dict[str, trace_pb2.LeaseTrace] = field(default_factory=dict)
    """By attempt; that of a second copy ends in `-h`."""
    episodes: list[trace_pb2.EpisodeTrace] = field(default_factory=list)
    trajectories: list[trace_pb2.TrajectoryTrace] = field(default_factory=list)
    assembling: list[trace_pb2.TrajectoryTrace] = field(default_factory=list)
    """Those accepted since the task was last queued: their groups are still to come, or on their way."""
    groups: dict[str, _Whereabouts] = field(default_factory=dict)

    def read(self, entry: str) -> None:
        """Take one entry in; kinds that only other releases know are passed over."""
        kind, ms, *rest = entry.partition("\n")[0].split("\t")
        if kind == "Q":
            self.submit_ms = int(ms)
        elif kind == "L":
            self._leased(int(ms), rest[0], node_id=rest[1])
        elif kind == "H":
            self._leased(int(ms), f"{rest[0]}-h", node_id=rest[1])
        elif kind == "l":
            self._lease_ended(int(ms), rest[0], outcome=rest[1])
        elif kind == "h":
            self._lease_ended(int(ms), f"{rest[0]}-h", outcome=rest[1])
        elif kind == "E":
            self._pushed(int(ms), rest, entry.partition("\n")[2])
        elif kind == "X":
            self._requeued()
        elif kind in "GBRDA":
            self._moved(kind, int(ms), rest)

    def _leased(self, ms: int, name: str, *, node_id: str) -> None:
        self.leases[name] = trace_pb2.LeaseTrace(
            lease_id=f"{self.task_id}#{name}",
            attempt=int(name.removesuffix("-h")),
            node_id=node_id,
            lease_time=timestamp(ms),
        )

    def _lease_ended(self, ms: int, name: str, *, outcome: str) -> None:
        lease = self.leases.get(name)
        if lease is not None:
            lease.outcome = outcome
            lease.end_time.CopyFrom(timestamp(ms))

    def _pushed(self, ms: int, fields: list[str], pushed: str) -> None:
        """Episodes of one push, a line of each; after an empty one those of their trajectories, as many of each."""
        episodes, trajectories = (
            [line.split("\t") for line in part.split("\n") if line] for part in pushed.partition("\n\n")[::2]
        )
        if len(fields) != 5 or any(len(row) == 1 for row in episodes):
            return  # what was refused as poison may have a separator within an id
        attempt, node_id, outcome, failed, reason = fields
        num_each = len(trajectories) // max(1, len(episodes))
        for place, (member, episode_id, *_) in enumerate(episodes):
            self.episodes.append(
                trace_pb2.EpisodeTrace(
                    episode_id=episode_id,
                    member=int(member),
                    attempt=int(attempt),
                    node_id=node_id,
                    outcome=outcome,
                    reason=reason,
                    failed=failed == "1",
                    push_time=timestamp(ms),
                )
            )
            for item in trajectories[place * num_each : (place + 1) * num_each]:
                trajectory = _trajectory(item, episode_id=episode_id, ms=ms)
                self.trajectories.append(trajectory)
                if outcome in _KEPT:
                    self.assembling.append(trajectory)
                else:
                    trajectory.place = trace_pb2.TRAJECTORY_PLACE_DROPPED
                    trajectory.drop_reason = outcome.lower()

    def _moved(self, kind: str, ms: int, fields: list[str]) -> None:
        gid, *rest = fields
        before = self.groups.get(gid)
        batch_id, step = (before.batch_id, before.step) if before else ("", 0)
        dropped, reason = trace_pb2.TRAJECTORY_PLACE_DROPPED, ""
        if kind == "B":
            place, batch_id, step = trace_pb2.TRAJECTORY_PLACE_IN_BATCH, rest[0], int(rest[1])
        elif kind == "R" or (kind == "G" and rest[0] == "ready"):
            place, batch_id, step = trace_pb2.TRAJECTORY_PLACE_READY, "", 0
        elif kind == "A" and rest[0] == "trained":
            place = trace_pb2.TRAJECTORY_PLACE_TRAINED
        elif rest[0].startswith("evaluated_"):
            place = trace_pb2.TRAJECTORY_PLACE_EVALUATED
        else:
            place, reason = dropped, ": ".join(rest[: 2 if kind == "D" else 1])
        self.groups[gid] = _Whereabouts(place=place, ms=ms, reason=reason, batch_id=batch_id, step=step)

    def _requeued(self) -> None:
        """What came before has met its end; from now on the task's groups are others."""
        self.place()
        self.assembling, self.groups = [], {}

    def place(self) -> None:
        """Say of each trajectory where its group is."""
        for trajectory in self.assembling:
            gid = group_id(self.task_id, policy_id=trajectory.policy_id, role=trajectory.role)
            whereabouts = self.groups.get(gid)
            if whereabouts is not None:
                trajectory.group_id = gid
                trajectory.place = whereabouts.place
                trajectory.drop_reason = whereabouts.reason
                trajectory.batch_id, trajectory.step = whereabouts.batch_id, whereabouts.step
                trajectory.place_time.CopyFrom(timestamp(whereabouts.ms))

    def all_evaluated(self) -> None:
        """The task was an evaluation's: what was accepted is counted there."""
        for trajectory in self.assembling:
            trajectory.place = trace_pb2.TRAJECTORY_PLACE_EVALUATED


def task_trace(stored: StoredTrace) -> trace_pb2.TaskTrace:
    """Return the contract's form of a task's trace, the published versions left out."""
    history = _History(stored.task_id)
    for entry in stored.entries:
        history.read(entry)
    history.place()
    lane = stored.lane or _lane(stored)
    if lane.partition(":")[0] not in ("", TRAIN_LANE):
        history.all_evaluated()
    if stored.deadline_ms and str(stored.attempt) in history.leases:
        history.leases[str(stored.attempt)].deadline_time.CopyFrom(timestamp(stored.deadline_ms))
    message = trace_pb2.TaskTrace(
        task_id=stored.task_id,
        state=_STATES.get(stored.state, trace_pb2.TASK_STATE_UNSPECIFIED),
        lane=lane,
        group_size=stored.group_size,
        missing_members=stored.missing,
        closed_reason=stored.why,
        refused_by=stored.refused_by,
        leases=history.leases.values(),
        episodes=history.episodes,
        trajectories=history.trajectories,
        truncated=len(stored.entries) >= MAX_ENTRIES or (not stored.entries and stored.state != "queued"),
    )
    if history.submit_ms:
        message.submit_time.CopyFrom(timestamp(history.submit_ms))
    return message


def trained_steps(trace: trace_pb2.TaskTrace) -> dict[str, list[int]]:
    """Return, by policy, the steps that trained on the task."""
    steps: dict[str, set[int]] = {}
    for trajectory in trace.trajectories:
        if trajectory.place == trace_pb2.TRAJECTORY_PLACE_TRAINED:
            steps.setdefault(trajectory.policy_id, set()).add(trajectory.step)
    return {policy_id: sorted(found) for policy_id, found in steps.items()}


def note_published(trace: trace_pb2.TaskTrace, policy_id: str, versions: Mapping[int, int]) -> None:
    """Fill in which version each trained step of a policy published."""
    for trajectory in trace.trajectories:
        is_trained = trajectory.place == trace_pb2.TRAJECTORY_PLACE_TRAINED
        if is_trained and trajectory.policy_id == policy_id and trajectory.step in versions:
            trajectory.published_version = versions[trajectory.step]


def _lane(stored: StoredTrace) -> str:
    """The lane a finished task was queued in; its trace remembers."""
    for entry in stored.entries[:1]:
        kind, _, *rest = entry.split("\t")
        return rest[0] if kind == "Q" else ""
    return ""


def _trajectory(item: Sequence[str], *, episode_id: str, ms: int) -> trace_pb2.TrajectoryTrace:
    trajectory_id, policy_id, role, oldest, newest, reward = item
    return trace_pb2.TrajectoryTrace(
        trajectory_id=trajectory_id,
        episode_id=episode_id,
        policy_id=policy_id,
        role=role,
        min_version=int(oldest),
        max_version=int(newest),
        reward=float(reward),
        place=trace_pb2.TRAJECTORY_PLACE_ASSEMBLING,
        place_time=timestamp(ms),
    )
