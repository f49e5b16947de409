"""Tasks, leases, episodes and groups in Redis.

Commits are sent many at a time in one pipeline: payloads first, then one function call per episode that
refers to them, so a crash in between leaves only garbage that expires. Called by leasing, ingest and the
run loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from astraflow.errors import AstraflowError, NotFoundError
from astraflow_dataflow.records import (
    CommitReply,
    CompleteTask,
    Grant,
    GroupVerdict,
    LeaseReply,
    NewTask,
    Outcome,
    PushedEpisode,
    PushedItem,
    Refusal,
    Supply,
)
from astraflow_dataflow.store.connection import (
    Argument,
    Call,
    Connection,
    Reply,
    as_bytes,
    as_int,
    as_list,
    as_text,
)
from astraflow_dataflow.store.keys import TRAIN_LANE, Keys

PAYLOAD_TTL_S = 3600
"""Life of a payload whose commit never came."""


class TaskStore:
    """Task lanes and leases."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def submit(self, run_id: str, tasks: Sequence[NewTask]) -> int:
        """Add tasks to the training lane. Returns how many were new. Raises PreconditionError when the run finishes."""
        return as_int(await self._connection.call(Keys(run_id), "submit", TRAIN_LANE, *_flat(tasks)))

    async def feed(
        self,
        run_id: str,
        *,
        expected_cursor: int,
        next_cursor: int,
        exhausted: bool,
        tasks: Sequence[NewTask],
    ) -> bool:
        """Add the data set's next tasks and move its cursor. Returns False when another server was first."""
        reply = await self._connection.call(
            Keys(run_id), "feed", expected_cursor, next_cursor, "1" if exhausted else "0", *_flat(tasks)
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
    ) -> LeaseReply:
        """Lease at most `want` tasks: evaluations of exactly the versions served first, then training
        within admission.
        """
        pairs: list[Argument] = [part for item in serving.items() for part in item]
        reply = as_list(
            await self._connection.call(
                Keys(run_id), "lease", node_id, want, _ms(ttl_s), _ms(horizon_s), max_held, session, *pairs
            )
        )
        return LeaseReply(
            grants=tuple(_grant(item) for item in as_list(reply[1])),
            waiting_for=as_text(reply[0]),
            more=as_text(reply[2]) == "1",
        )

    async def renew(self, run_id: str, *, node_id: str, lease_ids: Sequence[str], ttl_s: float) -> list[str]:
        """Extend leases to a full time to live. Returns those that are not this node's any more."""
        lost: list[str] = []
        for start in range(0, len(lease_ids), 256):
            chunk = lease_ids[start : start + 256]
            reply = await self._connection.call(Keys(run_id), "renew", node_id, _ms(ttl_s), *chunk)
            lost += [as_text(item) for item in as_list(reply)]
        return lost

    async def fail(
        self,
        run_id: str,
        *,
        node_id: str,
        lease_id: str,
        reason: str,
        detail: str,
        retryable: bool,
        free: bool,
        backoff_s: float,
    ) -> bool:
        """Give a lease back; `free` costs no attempt. Returns whether the task will be leased again."""
        flags = ("1" if retryable else "0", "1" if free else "0")
        reply = await self._connection.call(
            Keys(run_id), "fail", node_id, lease_id, reason, detail, *flags, _ms(backoff_s)
        )
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
        self, run_id: str, episodes: Sequence[PushedEpisode], *, evaluations: Sequence[bool], horizon_s: float
    ) -> list[CommitReply | AstraflowError]:
        """Store payloads and commit episodes in one pipeline; payloads of evaluation episodes are not kept.

        Returns one reply, or typed error, per episode. Raises UnavailableError when Redis is away.
        """
        keys = Keys(run_id)
        calls: list[Call] = [
            ("commit", _commit_arguments(episode, horizon_s=horizon_s)) for episode in episodes
        ]
        payloads = [
            (keys.of("payload", episode.episode_id, item.trajectory_id), item.body, PAYLOAD_TTL_S)
            for episode, is_evaluation in zip(episodes, evaluations, strict=True)
            if not is_evaluation
            for item in episode.items
        ]
        replies = await self._connection.call_many(keys, calls, payloads=payloads)
        if payloads and any(isinstance(reply, NotFoundError) for reply in replies):
            # The run was deleted meanwhile: it must leave nothing behind.
            await self._connection.raw("UNLINK", *(key for key, _, _ in payloads))
        return [
            reply if isinstance(reply, AstraflowError) else _commit_reply(episode.task_id, reply)
            for episode, reply in zip(episodes, replies, strict=True)
        ]

    async def quarantine(self, run_id: str, refusal: Refusal) -> tuple[Outcome, str, int]:
        """Count and keep a refused episode. Returns (outcome, reason, position): a repeated one keeps its first
        answer.
        """
        reply = as_list(
            await self._connection.call(
                Keys(run_id),
                "quarantine",
                refusal.task_id,
                refusal.member,
                refusal.episode_id,
                refusal.node_id,
                refusal.reason,
                refusal.detail,
                refusal.num_trajectories,
                refusal.sample,
                refusal.attempt,
            )
        )
        return Outcome(as_text(reply[0])), as_text(reply[1]), as_int(reply[2])

    async def complete_task(self, run_id: str, task_id: str) -> CompleteTask | None:
        """Return a complete task that waits to be settled, or None when it does not."""
        reply = as_list(await self._connection.call(Keys(run_id), "members", task_id))
        return _complete_task(task_id, reply)

    async def settle(
        self, run_id: str, task_id: str, verdicts: Sequence[GroupVerdict], *, tombstone_s: float
    ) -> bool:
        """Move a complete task's groups to ready or dropped. Returns False when another server was first."""
        arguments: list[Argument] = [task_id, _ms(tombstone_s)]
        for verdict in verdicts:
            arguments += [
                verdict.group_id,
                verdict.policy_id,
                verdict.verdict,
                "1" if verdict.judged else "0",
            ]
            arguments += [len(verdict.trajectory_ids), verdict.oldest_version, repr(verdict.reward_sum)]
            arguments += [verdict.items, "\n".join(verdict.trajectory_ids)]
        return as_int(await self._connection.call(Keys(run_id), "settle", *arguments)) == 1

    async def unsettled(self, run_id: str, *, least_age_s: float, limit: int) -> list[str]:
        """Return complete tasks that nobody settled for `least_age_s`."""
        reply = await self._connection.call(Keys(run_id), "unsettled", _ms(least_age_s), limit)
        return [as_text(item) for item in as_list(reply)]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _flat(tasks: Sequence[NewTask]) -> list[Argument]:
    flat: list[Argument] = []
    for task in tasks:
        flat += [task.task_id, task.group_size, task.spec]
    return flat


def _grant(reply: Reply) -> Grant:
    fields = as_list(reply)
    missing = as_text(fields[4])
    return Grant(
        task_id=as_text(fields[0]),
        attempt=as_int(fields[1]),
        spec=as_bytes(fields[2]),
        evaluation_id=as_text(fields[3]),
        members=tuple(int(part) for part in missing.split(",") if part),
    )


def _commit_arguments(episode: PushedEpisode, *, horizon_s: float) -> tuple[Argument, ...]:
    arguments: list[Argument] = [
        episode.task_id,
        episode.member,
        episode.attempt,
        episode.episode_id,
        episode.node_id,
    ]
    arguments += ["1" if episode.hedge else "0", "1" if episode.failed else "0", _ms(horizon_s)]
    for item in episode.items:
        arguments += [item.trajectory_id, item.policy_id, repr(item.reward), item.header, _traced(item)]
    return tuple(arguments)


def _complete_task(task_id: str, fields: list[Reply]) -> CompleteTask | None:
    if not fields:
        return None
    credited, held = as_text(fields[1]), as_list(fields[4])
    return CompleteTask(
        task_id=task_id,
        why=as_text(fields[0]),
        credited=None if credited == "*" else frozenset(filter(None, credited.split("\n"))),
        group_size=as_int(fields[2]),
        num_finished=as_int(fields[3]),
        headers={as_text(key): as_bytes(value) for key, value in zip(held[::2], held[1::2], strict=True)},
        spec=as_bytes(fields[5]),
    )


def _commit_reply(task_id: str, reply: Reply) -> CommitReply:
    fields = as_list(reply)
    outcome = as_text(fields[0])
    return CommitReply(
        outcome=None if outcome == "RETRY" else Outcome(outcome),
        detail=as_text(fields[1]),
        completed=_complete_task(task_id, as_list(fields[2])),
        position=as_int(fields[3]),
    )


def _traced(item: PushedItem) -> str:
    versions = f"{item.min_version}\t{item.max_version}"
    return f"{item.trajectory_id}\t{item.policy_id}\t{item.role}\t{versions}\t{item.reward!r}"
