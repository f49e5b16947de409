"""What a dataflow server must answer, as a model without Redis, time or concurrency.

One run with one trained policy, groups of two and steps of two groups. `Model` says of each call what it returns and
what is counted afterwards; its rules are those of docs/data-path.md. The stateful test compares real servers with it,
call by call. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from astraflow.rollout.v1 import task_pb2, trajectory_pb2

GROUP_SIZE = GROUPS_PER_STEP = MAX_ATTEMPTS = 2
MAX_STALENESS = MAX_BEHIND = 1
SMOOTHING, FLOOR = 1 / 8, 0.25
OPEN = {"queued", "leased", "retry"}


@dataclass
class ModelTask:
    """A task; `held` are the trajectories of its members, `charged` says whether it holds credit."""

    state: str = "queued"
    attempt: int = 0
    tries: int = 0
    node: str = ""
    charged: bool = False
    members: dict[int, str] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    rewards: dict[int, float] = field(default_factory=dict)
    oldest: int = 1 << 30


@dataclass
class ModelBatch:
    """What is bound to a step."""

    groups: list[tuple[int, int, str]]
    base: int
    stage: str = ""


@dataclass
class Model:
    """The state of the run; `groups` are (oldest version, when it became ready, task)."""

    filters: bool = True
    switched: bool | None = None
    """What `filters` will be when the step in hand ends."""
    tasks: dict[str, ModelTask] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    letters: list[str] = field(default_factory=list)
    """Dead letters, oldest first."""
    answers: dict[tuple[str, str], str] = field(default_factory=dict)
    ready: set[tuple[int, int, str]] = field(default_factory=set)
    batches: dict[int, ModelBatch] = field(default_factory=dict)
    ahead: int = 0
    """The step whose batch was read ahead and not acquired since for itself; 0 when none was."""
    unpublished: dict[int, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    acceptance: float = 1.0
    epoch: int = 0
    version: int = -1
    finished: int = 0
    durable: int = 0
    now: int = 0
    """Counts calls: groups that one call makes ready may be in any order."""

    # Tasks.

    def submit(self, task_ids: Sequence[str]) -> None:
        """New tasks wait in their order; known ones are left alone."""
        for task_id in task_ids:
            if task_id not in self.tasks:
                self.tasks[task_id] = ModelTask()
                self.queue.append(task_id)

    @property
    def outstanding(self) -> int:
        """Groups between lease and ready."""
        return sum(task.charged for task in self.tasks.values())

    @property
    def credit(self) -> int:
        """Groups that may still be leased: equation 5.1 of the protocol."""
        room = (MAX_STALENESS + 1) * GROUPS_PER_STEP - len(self.ready) - sum(self.unpublished.values())
        return max(0, math.floor(room / max(self.acceptance, FLOOR) - self.outstanding + 1e-9))

    def leases(self, want: int) -> tuple[int, list[str]]:
        """How many tasks are leased again, whichever of those that wait, and which are leased for the first time."""
        again = min(want, sum(task.state == "retry" for task in self.tasks.values()))
        if self.version < 0:
            return 0, []
        waiting = [task_id for task_id in self.queue if self.tasks[task_id].state == "queued"]
        return again, waiting[: min(want - again, self.credit)]

    def lease(self, node: str, lease: task_pb2.Lease) -> None:
        """A node has got this lease."""
        task = self.tasks[lease.task.task_id]
        assert task.state in ("queued", "retry")
        assert list(lease.members) == [member for member in range(GROUP_SIZE) if member not in task.members]
        if task.state == "queued":
            self.queue.remove(lease.task.task_id)
            task.charged = True
        task.state, task.node = "leased", node
        task.attempt, task.tries = task.attempt + 1, task.tries + 1
        assert lease.attempt == task.attempt

    def holds(self, node: str, lease: task_pb2.Lease) -> bool:
        """Whether a lease is still this node's."""
        task = self.tasks[lease.task.task_id]
        return (task.state, task.attempt, task.node) == ("leased", lease.attempt, node)

    def give_again(self, task_id: str) -> bool:
        """A lease ended without its work; whether the task will be leased again."""
        task = self.tasks[task_id]
        if task.tries < MAX_ATTEMPTS:
            task.state = "retry"
            return True
        self.bury(task_id)
        return False

    def bury(self, task_id: str) -> None:
        """The task's tries are spent, or nothing can come of it."""
        self.letters.append(task_id)
        self._close(task_id, "incomplete")

    def fail(self, node: str, lease: task_pb2.Lease, *, free: bool, retryable: bool) -> bool:
        """A node gives a lease back; whether the task will be leased again."""
        task_id = lease.task.task_id
        if not self.holds(node, lease):
            return False
        if free:
            self.tasks[task_id].tries -= 1
        elif not retryable:
            self.bury(task_id)
            return False
        return self.give_again(task_id)

    def expire(self, task_id: str) -> None:
        """The deadline of a task's group is over."""
        self._close(task_id, "expired")

    def requeue(self) -> int:
        """All dead letters run anew; what was accepted of them answers DUPLICATE from now on."""
        dead, self.letters = self.letters, []
        for task_id in dead:
            before = self.tasks[task_id]
            self.answers |= {(task_id, episode): "DUPLICATE" for episode in before.members.values()}
            self.tasks[task_id] = ModelTask(attempt=before.attempt)
            self.queue.append(task_id)
        return len(dead)

    # Episodes.

    def push(self, episode: trajectory_pb2.Episode) -> str:
        """The outcome of a push."""
        task, known = self.tasks[episode.task_id], (episode.task_id, episode.episode_id)
        num, member = len(episode.trajectories), episode.member
        if task.members.get(member) == episode.episode_id:
            return "DUPLICATE"
        if known in self.answers:
            return self.answers[known]
        refusal = self._refusal(task, episode)
        self.counts["ingested"] += num
        if refusal:
            self.counts[refusal.lower()] += num
            self.answers[known] = refusal
            return refusal
        task.members[member] = episode.episode_id
        self.counts["assembling"] += num
        for item in episode.trajectories:
            task.rewards[member] = item.header.reward
            task.oldest = min(task.oldest, item.header.min_version)
        if not num:
            task.failed.add(member)
        late = not episode.hedge and episode.attempt < task.attempt
        if len(task.members) == GROUP_SIZE:
            self._close(episode.task_id, "incomplete")
        return "ACCEPTED_LATE" if late else "ACCEPTED"

    def _refusal(self, task: ModelTask, episode: trajectory_pb2.Episode) -> str:
        if any(math.isnan(item.header.reward) for item in episode.trajectories):
            return "POISON"
        if episode.hedge and not episode.trajectories:
            return "SUPERSEDED"  # a copy that failed says nothing of the other one
        if episode.member in task.members:
            return "FENCED" if not episode.hedge and episode.attempt < task.attempt else "SUPERSEDED"
        return "" if task.state in OPEN else "LATE_CLOSED"

    def _close(self, task_id: str, reason: str) -> None:
        """A task ends: its trajectories become a ready group, or all are dropped."""
        task = self.tasks[task_id]
        task.state, task.charged, num = "done", False, len(task.rewards)
        self.counts["assembling"] -= num
        if len(task.members) == GROUP_SIZE and not task.failed:
            kept = not self.filters or len(set(task.rewards.values())) > 1
            self.acceptance += SMOOTHING * (kept - self.acceptance)
            reason = "ready" if kept else "filtered"
            if kept:
                self.ready.add((task.oldest, self.now, task_id))
        self.counts[reason] += num

    # Batches.

    def switch(self, filters: bool) -> None:
        """Groups are judged otherwise from the end of the step in hand on."""
        self.switched = filters
        if not any(batch.stage in ("", "intent") for batch in self.batches.values()):
            self._end_step()

    def _end_step(self) -> None:
        if self.switched is not None:
            self.filters, self.switched = self.switched, None
            self._give_back_ahead()

    def _give_back_ahead(self) -> None:
        if self.ahead:
            groups = self.batches.pop(self.ahead).groups
            del self.unpublished[self.ahead]
            self.ready |= set(groups)
            self._move(groups, "in_batch", "ready")
            self.ahead = 0

    def claim(self) -> int:
        """A trainer takes the policy over."""
        self.epoch += 1
        return self.epoch

    def offer(self, step: int, base: int) -> str | set[tuple[int, int, str]]:
        """What acquiring answers: an error, what it waits for, or the groups that must and may be bound."""
        if step in self.batches and step != self.ahead:
            return "bound"
        if step != self.finished + 1:
            return "NotFoundError" if step <= self.finished else "InvalidArgumentError"
        if base > self.version + MAX_BEHIND:
            return "publish"
        if step == self.ahead:
            if self._takes_up(self.batches[step], base):
                self.ahead = 0
                return "bound"
            self._give_back_ahead()
        stale = {group for group in self.ready if group[0] < base - MAX_STALENESS}
        self.ready -= stale
        self.counts["ready"] -= GROUP_SIZE * len(stale)
        self.counts["stale"] += GROUP_SIZE * len(stale)
        return set(self.ready) if len(self.ready) >= GROUPS_PER_STEP else "ready_groups"

    def _takes_up(self, batch: ModelBatch, base: int) -> bool:
        """Whether what was read ahead is for this version, and nothing that only this step may have is due before."""
        last, latest = base - MAX_STALENESS, max(batch.groups)
        return base == batch.base and not any(
            group[0] == last and group[:2] < latest[:2] for group in self.ready
        )

    def offer_ahead(self, step: int, base: int) -> str | tuple[int, set[tuple[int, int, str]]]:
        """What reading ahead answers: what it waits for, or the version and the groups that may be bound for it."""
        if step in self.batches:
            return "bound"
        if step <= self.finished:
            return "NotFoundError"
        in_hand = self.batches.get(step - 1)
        if step != self.finished + 2 or in_hand is None or self.ahead:
            return "not_ahead"
        base = max(base, in_hand.base + 1)
        if base > self.version + MAX_BEHIND + 1:
            return "publish"
        fresh = {group for group in self.ready if group[0] >= base - MAX_STALENESS}
        return (base, fresh) if len(fresh) >= GROUPS_PER_STEP else "ready_groups"

    def bind(
        self, step: int, task_ids: Sequence[str], *, base: int, among: set[tuple[int, int, str]]
    ) -> None:
        """These tasks' groups were bound, for a version; none that is left of those that may be was due before one."""
        taken = [group for group in among if group[2] in task_ids]
        assert len(taken) == len(set(task_ids)) == GROUPS_PER_STEP, "bound what is not ready"
        self.ready -= set(taken)
        nearest = all(max(group[:2] for group in taken) <= left[:2] for left in among - set(taken))
        assert nearest, "a group that is left was due before one that was bound"
        self.batches[step], self.unpublished[step] = ModelBatch(taken, base), GROUPS_PER_STEP
        if step == self.finished + 2:
            self.ahead = step
        self._move(taken, "ready", "in_batch")

    def ack(self, step: int, stage: str) -> str:
        """The stage that is recorded now, or the error."""
        batch = self.batches.get(step)
        if batch is None:
            return "NotFoundError"
        if step == self.ahead:
            return "PreconditionError"
        order = {"": 0, "intent": 1, "trained": 2, "skipped": 2}
        if order[batch.stage] == 2 and order[stage] == 2 and batch.stage != stage:
            return "ConflictError"
        if order[stage] <= order[batch.stage]:
            return batch.stage
        if stage == "trained" and not batch.stage:
            return "PreconditionError"
        batch.stage = stage
        if order[stage] == 2:
            self.finished = step
            self._move(batch.groups, "in_batch", stage)
            self._end_step()
            if stage == "skipped":
                del self.unpublished[step]
                self._give_back_ahead()
        return stage

    def give_back(self, step: int, *, dropped: str = "") -> str:
        """The batch of a step is not trained on, nor ever where it is dropped for a reason; the error, if there is
        one.
        """
        batch = self.batches.get(step)
        if batch is None:
            return "NotFoundError"
        if batch.stage in ("trained", "skipped"):
            return "PreconditionError"
        del self.batches[step], self.unpublished[step]
        if not dropped:
            self.ready |= set(batch.groups)
        self._move(batch.groups, "in_batch", dropped or "ready")
        if step == self.ahead:
            self.ahead = 0
        else:
            self._give_back_ahead()
            self._end_step()
        return ""

    def publish(self, step: int) -> None:
        """The next version was announced for a step."""
        self.version += 1
        for of_step in [known for known in self.unpublished if known <= min(step, self.finished)]:
            del self.unpublished[of_step]

    def mark_durable(self, step: int) -> str:
        """A checkpoint covers a step; the error, if there is one."""
        if step > self.finished:
            return "InvalidArgumentError"
        self.durable = max(self.durable, step)
        self.batches = {of: batch for of, batch in self.batches.items() if of > self.durable}
        return ""

    def _move(self, groups: Sequence[tuple[int, int, str]], source: str, target: str) -> None:
        self.counts[source] -= GROUP_SIZE * len(groups)
        self.counts[target] += GROUP_SIZE * len(groups)
