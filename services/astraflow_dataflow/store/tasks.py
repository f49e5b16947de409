"""Tasks, leases, episodes and groups in Redis, and trajectories that wait to be archived.

Many commits are sent as one transaction: payloads, then one function call that refers to them. A pack of the archive,
once sealed, never changes until it is written, so writing it again makes the same files. Called by leasing, ingest,
archiving and the run loop.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from astraflow.dataflow.v1.batch_pb2 import Batch, BatchItem
from astraflow.dataflow.v1.task_service_pb2 import LeaseFailure
from astraflow.dataflow.v1.trajectory_service_pb2 import Outcome, PushResult
from astraflow.errors import AstraflowError, InternalError, NotFoundError, PayloadMissingError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_dataflow.records import (
    NO_HEDGES,
    ArchiveEntry,
    ArchiveState,
    CompleteTask,
    Hedging,
    Offer,
    Pace,
    Supply,
)
from astraflow_dataflow.rules.evaluation import is_evaluation_task
from astraflow_dataflow.rules.groups import (
    group_id,
    groups_of,
    item_of,
    items_of,
    placed_headers,
    was_judged,
)
from astraflow_dataflow.rules.scores import result_lines
from astraflow_dataflow.store.connection import Call
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.inside import call_with
from astraflow_dataflow.store.payloads.packs import Payloads, Place
from astraflow_dataflow.store.replies import (
    Reply,
    as_bytes,
    as_int,
    as_list,
    as_mapping,
    as_text,
    as_texts,
    flag,
)
from astraflow_dataflow.store.writing import Argument

MAX_SAMPLE_BYTES = 64 * 1024
"""Of an episode that is kept in quarantine."""
MAX_PACK_ENTRIES = 256
"""Groups in one pack of the archive at most."""
ACCEPTED = (Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_ACCEPTED_LATE)
Pushed: TypeAlias = PushResult | AstraflowError
"""What became of an episode, or why it must be pushed again."""
_OUTCOMES = {name.removeprefix("OUTCOME_"): number for name, number in Outcome.items()}
"""By the names that the functions have for them."""
_MOST_COUNTED = 1_000_000
_Headers: TypeAlias = Sequence[trajectory_pb2.TrajectoryHeader]
DeadlineOf = Callable[[str, Sequence[BatchItem]], int]


class TaskStore:
    """Task lanes and leases."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def submit(self, run_id: str, tasks: Sequence[task_pb2.Task]) -> int:
        """Add tasks to the training lane. Returns how many were new. Raises PreconditionError when the run finishes."""
        return as_int(await self._connection.call(Keys(run_id), "submit", *flat(tasks)))

    async def feed(
        self,
        run_id: str,
        *,
        expected_cursor: int,
        next_cursor: int,
        exhausted: bool,
        tasks: Sequence[task_pb2.Task],
    ) -> int:
        """Add the data set's next tasks and move its cursor. Returns how many the run did not have; -1 when another
        server was first.
        """
        reply = await self._connection.call(
            Keys(run_id), "feed", expected_cursor, next_cursor, flag(exhausted), *flat(tasks)
        )
        return as_int(reply)

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
        max_fresh: int,
        serving: Mapping[str, int],
        request_share: float = 1.0,
        session: str = "",
        hedging: Hedging = NO_HEDGES,
    ) -> Offer:
        """Lease at most `want` tasks: evaluations of exactly the versions served first, those on request up to
        `request_share` of the node's leases, then training within admission, then what is left of the evaluations.
        Tasks that nobody had before only while the node holds fewer than `max_fresh`, and second copies, by `hedging`,
        where there is nothing else.
        What the recipe says of a lease is left out.
        """
        arguments: list[Argument] = [node_id, want, _ms(ttl_s), _ms(horizon_s), max_held, max_fresh]
        arguments += [100 * request_share, session, _ms(hedging.after_s), hedging.max_share]
        arguments += [part for item in serving.items() for part in item]
        reply = as_list(await self._connection.call(Keys(run_id), "lease", *arguments))
        return Offer(
            leases=[_lease(item) for item in as_list(reply[1])],
            waiting_for=as_text(reply[0]),
            more=as_text(reply[2]) == "1",
        )

    async def paces(self, run_id: str) -> tuple[int, list[Pace]]:
        """Return how much training is leased or could be, in tasks, and what each connected node can do."""
        work, *found = as_list(await self._connection.call(Keys(run_id), "paces"))
        nodes = zip(found[::3], found[1::3], found[2::3], strict=True)
        return as_int(work), [
            Pace(node_id=as_text(name), slots=as_int(slots), task_s=float(as_text(task_ms)) / 1000)
            for name, slots, task_ms in nodes
        ]

    async def durations_s(self, run_id: str) -> list[float]:
        """Return how long the newest tasks took that one node finished at its first attempt; hedged runs note that."""
        reply = await self._connection.raw("LRANGE", Keys(run_id).of("durations"), 0, -1)
        return [float(text) / 1000 for text in as_texts(reply)]

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

    def __init__(self, connection: Redis, payloads: Payloads) -> None:
        self._connection = connection
        self._payloads = payloads

    async def commit(
        self, run_id: str, episodes: Sequence[trajectory_pb2.Episode], *, horizon_s: float
    ) -> tuple[list[Pushed], list[CompleteTask]]:
        """Store payloads and commit valid episodes in one call; payloads of evaluation episodes are not kept.

        Returns what became of each episode, and the tasks that these completed and that wait to be settled. An
        episode's error is PayloadMissingError when it must be pushed again, InternalError when what Redis holds of its
        task is damaged. Raises NotFoundError, with all payloads removed, when the run is gone, UnavailableError when
        Redis is away.
        """
        headers = [list(placed_headers(episode)) for episode in episodes]
        reply, wrote_all = await self._commit(run_id, episodes, headers, horizon_s, some_exist=False)
        pushed = _pushed(episodes, reply)
        completed = as_list(reply[2])
        missing = [place for place, result in enumerate(pushed) if isinstance(result, PayloadMissingError)]
        if missing and not wrote_all:  # one of another episode was there already, so none was written
            again, their_headers = zip(*((episodes[place], headers[place]) for place in missing), strict=True)
            reply, _ = await self._commit(run_id, again, their_headers, horizon_s, some_exist=True)
            completed += as_list(reply[2])
            for place, result in zip(missing, _pushed(again, reply), strict=True):
                pushed[place] = result
        accepted = _accepted(episodes, headers, pushed) if completed else {}
        return pushed, [_completed(as_list(task), accepted) for task in completed]

    async def _commit(
        self,
        run_id: str,
        episodes: Sequence[trajectory_pb2.Episode],
        headers: Sequence[_Headers],
        horizon_s: float,
        *,
        some_exist: bool,
    ) -> tuple[list[Reply], bool]:
        """Return what the function answers, and whether all payloads were written for it."""
        keys = Keys(run_id)
        bodies = list(_bodies(episodes))
        packed = await self._payloads.write(run_id, [body for _, _, body in bodies])
        payloads = {
            keys.of("payload", episode_id, trajectory_id): body
            for episode_id, trajectory_id, body in bodies
            if not packed and body
        }
        # The function removes it, and learns from it that none of the payloads was there before.
        mark = "" if some_exist or not payloads else secrets.token_hex(8)
        arguments: list[Argument] = [_ms(horizon_s), mark, packed]
        for episode, own in zip(episodes, headers, strict=True):
            arguments += _commit_arguments(episode, own)
        if not payloads:
            return await self._commit_beside(run_id, episodes, packed, arguments), True
        if mark:
            payloads[keys.of("written", mark)] = b""
        reply, wrote_all = await call_with(
            self._connection, keys, payloads, "commit", *arguments, some_exist=some_exist
        )
        return as_list(reply), wrote_all

    async def _commit_beside(
        self,
        run_id: str,
        episodes: Sequence[trajectory_pb2.Episode],
        packed: str,
        arguments: Sequence[Argument],
    ) -> list[Reply]:
        """The same of payloads that are outside, or not kept."""
        try:
            reply = as_list(await self._connection.call(Keys(run_id), "commit", *arguments))
        except NotFoundError:
            await self._payloads.forgo(run_id, packed)
            raise
        if packed:
            await self._payloads.replace_lost(run_id, _repeated(episodes, _pushed(episodes, reply)))
        return reply

    async def quarantine(
        self, run_id: str, refused: Sequence[tuple[trajectory_pb2.Episode, BadTrajectory]]
    ) -> list[Pushed]:
        """Count and keep refused episodes with a sample of each; a repeated one gets its first answer.

        Returns one reply, or typed error, per episode.
        """
        calls: list[Call] = [("quarantine", _quarantine_arguments(*one)) for one in refused]
        results: list[Pushed] = []
        replies = await self._connection.call_many(Keys(run_id), calls) if calls else []
        for (_, problem), reply in zip(refused, replies, strict=True):
            if isinstance(reply, AstraflowError):
                results.append(reply)
                continue
            outcome, kept_reason, position = as_list(reply)
            result = _result(as_text(outcome), as_text(kept_reason), as_int(position))
            if result.reason == problem.slug:
                result.detail = problem.detail[:2048]
            results.append(result)
        return results

    async def complete_tasks(self, run_id: str, task_ids: Sequence[str]) -> list[CompleteTask]:
        """Return those of some tasks that are complete and wait to be settled."""
        found = as_list(await self._connection.call(Keys(run_id), "members", *task_ids))
        return [_complete_task(as_list(task), _stored_headers(as_list(task)[5])) for task in found]

    async def settle(
        self,
        run_id: str,
        judged: Sequence[tuple[CompleteTask, Sequence[str]]],
        *,
        deadline_of: DeadlineOf,
        tombstone_s: float,
        switch: int = 0,
    ) -> set[str] | None:
        """Move the groups of complete tasks to ready or dropped, by the verdict of each; `deadline_of` a policy and
        items is the version that a group counts as sampled with. Returns the tasks that another server had not
        settled before, None when they were judged by other plug-ins than those of the newest `switch`. Raises
        InternalError for one that holds other trajectories than were judged.
        """
        tasks = "\n".join(task.task_id for task, _ in judged)
        arguments: list[Argument] = [_ms(tombstone_s), switch, tasks]
        for task, verdicts in judged:
            arguments += _settled(task, verdicts, deadline_of)
        reply = await self._connection.call(Keys(run_id), "settle", *arguments)
        if not isinstance(reply, list):
            return None
        settled, wrong = as_list(reply)
        if problem := as_text(wrong):
            raise InternalError(problem)
        return set(as_texts(settled))

    async def unsettled(self, run_id: str, *, least_age_s: float, limit: int) -> list[str]:
        """Return complete tasks that nobody settled for `least_age_s`."""
        reply = await self._connection.call(Keys(run_id), "unsettled", _ms(least_age_s), limit)
        return as_texts(reply)


def _bodies(episodes: Iterable[trajectory_pb2.Episode]) -> Iterable[tuple[str, str, bytes]]:
    """Episode, trajectory and payload, in order; those of an evaluation are not kept, so theirs are empty."""
    for episode in episodes:
        is_kept = not is_evaluation_task(episode.task_id)
        for item in episode.trajectories:
            yield episode.episode_id, item.header.trajectory_id, item.body if is_kept else b""


def _repeated(
    episodes: Sequence[trajectory_pb2.Episode], pushed: Sequence[Pushed]
) -> dict[str, tuple[str, bytes]]:
    """Episode and payload of each trajectory that came again."""
    again = [
        episode
        for episode, result in zip(episodes, pushed, strict=True)
        if isinstance(result, PushResult) and result.outcome == Outcome.OUTCOME_DUPLICATE
    ]
    return {trajectory_id: (episode_id, body) for episode_id, trajectory_id, body in _bodies(again) if body}


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def flat(tasks: Sequence[task_pb2.Task]) -> list[Argument]:
    """Return id, group size, specification and priority of each task, as the functions that add tasks take them."""
    return [
        part
        for task in tasks
        for part in (task.task_id, task.group_size, task.SerializeToString(), task.priority)
    ]


def _lease(reply: Reply) -> task_pb2.Lease:
    task_id, attempt, spec, missing, uncredited, *copy = as_list(reply)
    return task_pb2.Lease(
        lease_id=f"{as_text(task_id)}#{as_int(attempt)}{'-h' if copy else ''}",
        hedge=bool(copy),
        task=task_pb2.Task.FromString(as_bytes(spec)),
        attempt=as_int(attempt),
        members=[int(part) for part in as_text(missing).split(",") if part],
        uncredited_roles=filter(None, as_text(uncredited).split("\n")),
    )


def _commit_arguments(episode: trajectory_pb2.Episode, headers: _Headers) -> list[Argument]:
    is_evaluation = is_evaluation_task(episode.task_id)
    how = f"{len(episode.trajectories)}{'h' if episode.hedge else ''}"
    if episode.status == trajectory_pb2.EPISODE_STATUS_FAILED:
        how += "f"
    if calls := _counted(episode, "environment.tool_calls"):
        how += f"t{calls},{_counted(episode, 'environment.tool_errors')}"
    who = f"{episode.member}\t{episode.attempt}\t{episode.node_id}\t{episode.episode_id}"
    arguments: list[Argument] = [episode.task_id, who, how + "e" if is_evaluation else how]
    if is_evaluation:
        arguments += [_metric_lines(episode), result_lines(episode)]
    for header in headers:
        arguments += [header.SerializeToString(), _traced(header)]
    return arguments


def _counted(episode: trajectory_pb2.Episode, name: str) -> int:
    """A metric that counts: whatever number a client wrote, within bounds."""
    return int(min(max(episode.metrics.get(name, 0.0), 0.0), _MOST_COUNTED))


def _quarantine_arguments(episode: trajectory_pb2.Episode, problem: BadTrajectory) -> tuple[Argument, ...]:
    return (
        episode.task_id,
        episode.member,
        episode.episode_id[:128],
        episode.node_id[:64],
        problem.slug,
        problem.detail[:2048],
        len(episode.trajectories),
        episode.SerializeToString()[:MAX_SAMPLE_BYTES],
        episode.attempt,
    )


def _metric_lines(episode: trajectory_pb2.Episode) -> str:
    """The metrics of an evaluation episode, value first; a name that takes more than a line is left out."""
    named = (f"{value!r} {name}" for name, value in episode.metrics.items() if name and "\n" not in name)
    return "\n".join(named)


def _settled(task: CompleteTask, verdicts: Sequence[str], deadline_of: DeadlineOf) -> Iterable[Argument]:
    """The arguments of `settle` for each group."""
    for group, batch, verdict in zip(task.groups, task.items, verdicts, strict=True):
        items = batch.items
        yield from (
            task.task_id,
            group.group_id,
            group.policy,
            verdict,
            flag(was_judged(verdict)),
            len(items),
        )
        yield from (deadline_of(group.policy, items), repr(sum(item.reward for item in items)))
        yield from (batch.SerializeToString(), "\n".join(item.trajectory_id for item in items))


def _accepted(
    episodes: Sequence[trajectory_pb2.Episode], headers: Sequence[_Headers], pushed: Sequence[Pushed]
) -> dict[str, list[trajectory_pb2.TrajectoryHeader]]:
    """The headers of accepted episodes by task."""
    accepted = dict[str, list[trajectory_pb2.TrajectoryHeader]]()
    for episode, own, result in zip(episodes, headers, pushed, strict=True):
        if isinstance(result, PushResult) and result.outcome in ACCEPTED:
            accepted.setdefault(episode.task_id, []).extend(own)
    return accepted


def _completed(fields: list[Reply], accepted: Mapping[str, _Headers]) -> CompleteTask:
    """A task that this commit completed. Of one that came as a whole Redis does not repeat the headers: they are
    those of its episodes that were accepted.
    """
    if isinstance(fields[5], list):
        return _complete_task(fields, _stored_headers(fields[5]))
    return _complete_task(fields, accepted.get(as_text(fields[0]), ()))


def _stored_headers(held: Reply) -> list[trajectory_pb2.TrajectoryHeader]:
    """The headers of a task's trajectories."""
    return [trajectory_pb2.TrajectoryHeader.FromString(as_bytes(part)) for part in as_list(held)]


def _complete_task(fields: list[Reply], headers: _Headers) -> CompleteTask:
    task_id, why, credited, size, num_finished, _, spec = fields
    groups = groups_of(as_text(task_id), spec=as_bytes(spec), headers=headers)
    return CompleteTask(
        task_id=as_text(task_id),
        why=as_text(why),
        credited=None if as_text(credited) == "*" else frozenset(filter(None, as_text(credited).split("\n"))),
        group_size=as_int(size),
        num_finished=as_int(num_finished),
        groups=groups,
        items=[items_of(as_text(task_id), group) for group in groups],
    )


def _pushed(episodes: Sequence[trajectory_pb2.Episode], reply: Sequence[Reply]) -> list[Pushed]:
    position, outcomes, _ = reply
    return [
        _committed(episode, as_text(outcome), position=as_int(position))
        for episode, outcome in zip(episodes, as_list(outcomes), strict=True)
    ]


def _committed(episode: trajectory_pb2.Episode, outcome: str, *, position: int) -> Pushed:
    name, _, detail = outcome.partition(" ")
    if name == "RETRY":
        return PayloadMissingError(
            f"the payload of episode {episode.episode_id} is gone; push it again", retry_after_s=0.1
        )
    if name == "ERROR":
        return InternalError(f"Redis answered an error for task {episode.task_id}: {detail}")
    return _result(name, detail, position)


def _result(outcome: str, reason: str, position: int) -> PushResult:
    return PushResult(outcome=_OUTCOMES[outcome], reason=reason, position=position)


def _traced(header: trajectory_pb2.TrajectoryHeader) -> str:
    versions = f"{header.min_version}\t{header.max_version}"
    return f"{header.trajectory_id}\t{header.policy_id}\t{header.role}\t{versions}\t{header.reward!r}"


class ArchiveStore:
    """What waits to be archived."""

    def __init__(self, connection: Redis, payloads: Payloads) -> None:
        self._connection = connection
        self._payloads = payloads

    async def pack(
        self, run_id: str, *, server: str, lease_s: float, least_age_s: float, pack_bytes: int
    ) -> list[ArchiveEntry]:
        """Return what is to be written now, the same until it is `written`; nothing while another server writes.

        It is sealed when `pack_bytes` wait, or the oldest entry has waited for `least_age_s`.
        """
        arguments = (server, int(lease_s * 1000), int(least_age_s * 1000), pack_bytes, MAX_PACK_ENTRIES)
        reply = await self._connection.call(Keys(run_id), "archive_pack", *arguments)
        return [_archived(as_list(item)) for item in as_list(reply)]

    async def bodies(self, run_id: str, entry: ArchiveEntry) -> list[bytes | None]:
        """Return the payload of each trajectory of an entry; None for one that was lost."""
        items = zip(entry.places, entry.items, strict=True)
        return await self._payloads.read(run_id, [Place(place, item.trajectory_id) for place, item in items])

    async def written(self, run_id: str, entries: Iterable[ArchiveEntry], *, num_bytes: int) -> int:
        """Forget a pack that is in the run's store. Returns its trajectories, 0 when another server was first."""
        *_, last = entries
        return as_int(await self._connection.call(Keys(run_id), "archive_written", last.entry_id, num_bytes))

    async def failed(self, run_id: str, problem: str) -> None:
        """Note why nothing can be written now, until something is."""
        await self._connection.call(Keys(run_id), "archive_failed", problem[:2048])

    async def state(self, run_id: str) -> ArchiveState:
        """Return the figures of a run's archive."""
        fields = as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of("archive")))
        return ArchiveState(
            waiting=as_int(fields.get("waiting")),
            waiting_bytes=as_int(fields.get("bytes")),
            written=as_int(fields.get("written")),
            written_bytes=as_int(fields.get("written_bytes")),
            given_up=as_int(fields.get("given_up")),
            given_up_ms=as_int(fields.get("given_up_ms")),
            problem=as_text(fields.get("problem")),
            problem_ms=as_int(fields.get("problem_ms")),
        )


def _archived(reply: list[Reply]) -> ArchiveEntry:
    fields = as_mapping(reply[1])
    ids = as_text(fields["ids"]).split("\n")
    items = {item.trajectory_id: item for item in _archived_items(fields)}
    return ArchiveEntry(
        entry_id=as_text(reply[0]),
        policy_id=as_text(fields["policy"]),
        step=as_int(fields["step"]),
        reason=as_text(fields["reason"]),
        batch_id=as_text(fields["batch"]),
        items=[items[trajectory_id] for trajectory_id in ids],
        places=as_text(fields["episodes"]).split("\n"),
    )


def _archived_items(fields: dict[str, bytes]) -> Iterable[BatchItem]:
    """What a batch says of the group, or would say of a trajectory that came to none."""
    if "items" in fields:
        return Batch.FromString(fields["items"]).items
    header = trajectory_pb2.TrajectoryHeader.FromString(fields["header"])
    task_id = as_text(fields["gid"]).partition("/")[0]
    group = group_id(task_id, policy_id=header.policy_id, role=header.role)
    return [item_of(task_id, header, group_id=group)]
