"""Tasks, leases, episodes and groups in Redis.

Commits are sent many at a time in one pipeline: payloads first, then one function call per episode that
refers to them, so a crash in between leaves only garbage that expires. Called by leasing, ingest and the
run loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from astraflow.dataflow.v1.task_service_pb2 import LeaseFailure
from astraflow.dataflow.v1.trajectory_service_pb2 import Outcome, PushResult
from astraflow.errors import AstraflowError, PayloadMissingError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.records import Committed, CompleteTask, Offer, Supply
from astraflow_dataflow.rules.evaluation import is_evaluation_task
from astraflow_dataflow.rules.groups import groups_of, items_of, placed_headers, was_judged
from astraflow_dataflow.rules.scores import result_lines
from astraflow_dataflow.store.connection import Argument, Call, Connection
from astraflow_dataflow.store.keys import TRAIN_LANE, Keys
from astraflow_dataflow.store.replies import Reply, as_bytes, as_int, as_list, as_text, as_texts, flag

PAYLOAD_TTL_S = 3600
"""Life of a payload whose commit never came."""
MAX_SAMPLE_BYTES = 64 * 1024
"""Of an episode that is kept in quarantine."""


class TaskStore:
    """Task lanes and leases."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def submit(self, run_id: str, tasks: Sequence[task_pb2.Task]) -> int:
        """Add tasks to the training lane. Returns how many were new. Raises PreconditionError when the run finishes."""
        return as_int(await self._connection.call(Keys(run_id), "submit", TRAIN_LANE, *flat(tasks)))

    async def feed(
        self,
        run_id: str,
        *,
        expected_cursor: int,
        next_cursor: int,
        exhausted: bool,
        tasks: Sequence[task_pb2.Task],
    ) -> bool:
        """Add the data set's next tasks and move its cursor. Returns False when another server was first."""
        reply = await self._connection.call(
            Keys(run_id), "feed", expected_cursor, next_cursor, flag(exhausted), *flat(tasks)
        )
        return as_int(reply) >= 0

    async def supply(self, run_id: str) -> Supply:
        """Return the curator's figures."""
        reply = as_list(await self._connection.call(Keys(run_id), "supply"))
        return Supply(
            cursor=as_int(reply[0]),
            exhausted=as_text(reply[1]) == "1",
            active=as_text(reply[2]) == "active",
            queued=as_int(reply[3]),
            credit=as_int(reply[4]),
        )

    async def lease(
        self,
        run_id: str,
        *,
        node_id: str,
        want: int,
        ttl_s: float,
        horizon_s: float,
        max_held: int,
        serving: Mapping[str, int],
        session: str = "",
    ) -> Offer:
        """Lease at most `want` tasks: evaluations of exactly the versions served first, then training
        within admission. What the recipe says of a lease is left out.
        """
        pairs: list[Argument] = [part for item in serving.items() for part in item]
        reply = as_list(
            await self._connection.call(
                Keys(run_id), "lease", node_id, want, _ms(ttl_s), _ms(horizon_s), max_held, session, *pairs
            )
        )
        return Offer(
            leases=[_lease(item) for item in as_list(reply[1])],
            waiting_for=as_text(reply[0]),
            more=as_text(reply[2]) == "1",
        )

    async def renew(self, run_id: str, *, node_id: str, lease_ids: Sequence[str], ttl_s: float) -> list[str]:
        """Extend leases to a full time to live. Returns those that are not this node's any more."""
        lost: list[str] = []
        for start in range(0, len(lease_ids), 256):
            chunk = lease_ids[start : start + 256]
            reply = await self._connection.call(Keys(run_id), "renew", node_id, _ms(ttl_s), *chunk)
            lost += as_texts(reply)
        return lost

    async def fail(
        self, run_id: str, failure: LeaseFailure, *, node_id: str, free: bool, backoff_s: float, kind: str
    ) -> bool:
        """Give a lease back; `free` costs no attempt, and else it counts among failures of its `kind`.

        Returns whether the task will be leased again.
        """
        arguments = (failure.lease_id, failure.reason, failure.detail, flag(failure.retryable), flag(free))
        reply = await self._connection.call(Keys(run_id), "fail", node_id, *arguments, _ms(backoff_s), kind)
        return as_int(reply) == 1

    async def sweep(self, run_id: str, *, limit: int) -> tuple[int, int]:
        """Expire leases and groups whose time is over. Returns (leases, groups)."""
        reply = as_list(await self._connection.call(Keys(run_id), "sweep", limit))
        return as_int(reply[0]), as_int(reply[1])

    async def close_training(self, run_id: str, *, limit: int) -> int:
        """Close admitted training tasks of a finishing run. Returns how many."""
        return as_int(await self._connection.call(Keys(run_id), "close_training", limit))


class EpisodeStore:
    """Commits of episodes, and the groups they complete."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def commit(
        self, run_id: str, episodes: Sequence[trajectory_pb2.Episode], *, horizon_s: float
    ) -> list[Committed | AstraflowError]:
        """Store payloads and commit valid episodes in one pipeline; payloads of evaluation episodes are not kept.

        Returns one reply, or typed error, per episode: PayloadMissingError when it must be pushed again, NotFoundError,
        with its payloads removed, when the run is gone. Raises UnavailableError when Redis is away.
        """
        keys = Keys(run_id)
        calls: list[Call] = [
            ("commit", _commit_arguments(episode, horizon_s=horizon_s)) for episode in episodes
        ]
        payloads = [
            (keys.of("payload", episode.episode_id, item.header.trajectory_id), item.body, PAYLOAD_TTL_S)
            for episode in episodes
            if not is_evaluation_task(episode.task_id)
            for item in episode.trajectories
        ]
        replies = await self._connection.call_many(keys, calls, payloads=payloads)
        return [
            reply if isinstance(reply, AstraflowError) else _committed(episode, reply)
            for episode, reply in zip(episodes, replies, strict=True)
        ]

    async def quarantine(
        self, run_id: str, episode: trajectory_pb2.Episode, *, reason: str, detail: str
    ) -> PushResult:
        """Count and keep a refused episode with a sample of it; a repeated one gets its first answer."""
        reply = await self._connection.call(
            Keys(run_id),
            "quarantine",
            episode.task_id,
            episode.member,
            episode.episode_id[:128],
            episode.node_id[:64],
            reason,
            detail[:2048],
            len(episode.trajectories),
            episode.SerializeToString()[:MAX_SAMPLE_BYTES],
            episode.attempt,
        )
        outcome, kept_reason, position = as_list(reply)
        result = _result(outcome, kept_reason, position)
        if result.reason == reason:
            result.detail = detail[:2048]
        return result

    async def complete_task(self, run_id: str, task_id: str) -> CompleteTask | None:
        """Return a complete task that waits to be settled, or None when it does not."""
        reply = as_list(await self._connection.call(Keys(run_id), "members", task_id))
        return _complete_task(task_id, reply)

    async def settle(
        self, run_id: str, task: CompleteTask, verdicts: Sequence[str], *, tombstone_s: float
    ) -> bool:
        """Move a complete task's groups to ready or dropped. Returns False when another server was first."""
        arguments: list[Argument] = [task.task_id, _ms(tombstone_s)]
        for group, batch, verdict in zip(task.groups, task.items, verdicts, strict=True):
            items = batch.items
            arguments += [group.group_id, group.policy, verdict, flag(was_judged(verdict)), len(items)]
            arguments += [min(item.min_version for item in items), repr(sum(item.reward for item in items))]
            arguments += [batch.SerializeToString(), "\n".join(item.trajectory_id for item in items)]
        return as_int(await self._connection.call(Keys(run_id), "settle", *arguments)) == 1

    async def unsettled(self, run_id: str, *, least_age_s: float, limit: int) -> list[str]:
        """Return complete tasks that nobody settled for `least_age_s`."""
        reply = await self._connection.call(Keys(run_id), "unsettled", _ms(least_age_s), limit)
        return as_texts(reply)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def flat(tasks: Sequence[task_pb2.Task]) -> list[Argument]:
    """Return id, group size and specification of each task, as the functions that add tasks take them."""
    return [part for task in tasks for part in (task.task_id, task.group_size, task.SerializeToString())]


def _lease(reply: Reply) -> task_pb2.Lease:
    task_id, attempt, spec, missing, uncredited = as_list(reply)
    return task_pb2.Lease(
        lease_id=f"{as_text(task_id)}#{as_int(attempt)}",
        task=task_pb2.Task.FromString(as_bytes(spec)),
        attempt=as_int(attempt),
        members=[int(part) for part in as_text(missing).split(",") if part],
        uncredited_roles=filter(None, as_text(uncredited).split("\n")),
    )


def _commit_arguments(episode: trajectory_pb2.Episode, *, horizon_s: float) -> tuple[Argument, ...]:
    arguments: list[Argument] = [
        episode.task_id,
        episode.member,
        episode.attempt,
        episode.episode_id,
        episode.node_id,
        flag(episode.hedge),
        flag(episode.status == trajectory_pb2.EPISODE_STATUS_FAILED),
        _ms(horizon_s),
        _evaluated(episode),
        result_lines(episode) if is_evaluation_task(episode.task_id) else "",
    ]
    for header in placed_headers(episode):
        arguments += [header.trajectory_id, header.policy_id, repr(header.reward)]
        arguments += [header.SerializeToString(), _traced(header)]
    return tuple(arguments)


def _evaluated(episode: trajectory_pb2.Episode) -> str:
    """The metrics of an evaluation episode, value first; a name that takes more than a line is left out."""
    if not is_evaluation_task(episode.task_id):
        return ""
    named = (f"{value!r} {name}" for name, value in episode.metrics.items() if name and "\n" not in name)
    return "\n".join(named)


def _complete_task(task_id: str, fields: list[Reply]) -> CompleteTask | None:
    if not fields:
        return None
    credited, held = as_text(fields[1]), as_list(fields[4])
    headers = {as_text(key): as_bytes(value) for key, value in zip(held[::2], held[1::2], strict=True)}
    groups = groups_of(task_id, spec=as_bytes(fields[5]), headers=headers)
    return CompleteTask(
        task_id=task_id,
        why=as_text(fields[0]),
        credited=None if credited == "*" else frozenset(filter(None, credited.split("\n"))),
        group_size=as_int(fields[2]),
        num_finished=as_int(fields[3]),
        groups=groups,
        items=[items_of(task_id, group) for group in groups],
    )


def _committed(episode: trajectory_pb2.Episode, reply: Reply) -> Committed | AstraflowError:
    outcome, detail, completed, position = as_list(reply)
    if outcome == b"RETRY":
        return PayloadMissingError(
            f"the payload of episode {episode.episode_id} is gone; push it again", retry_after_s=0.1
        )
    return Committed(
        result=_result(outcome, detail, position),
        completed=_complete_task(episode.task_id, as_list(completed)),
    )


def _result(outcome: Reply, reason: Reply, position: Reply) -> PushResult:
    return PushResult(
        outcome=Outcome.Value(f"OUTCOME_{as_text(outcome)}"),
        reason=as_text(reason),
        position=as_int(position),
    )


def _traced(header: trajectory_pb2.TrajectoryHeader) -> str:
    versions = f"{header.min_version}\t{header.max_version}"
    return f"{header.trajectory_id}\t{header.policy_id}\t{header.role}\t{versions}\t{header.reward!r}"
