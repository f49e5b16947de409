"""What people ask of a run in Redis: the trace of a task, dead letters, tasks that nobody can run.

Reads are single commands or one function call, changes are atomic functions. Called by reporting and the admin
service.
"""

from collections.abc import Mapping, Sequence

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.rollout.v1.task_pb2 import Task
from astraflow_dataflow.records import Refused, StepFigures, StoredTrace, timestamp
from astraflow_dataflow.rules.failures import TaskFailures
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import Reply, as_bytes, as_int, as_list, as_mapping, as_text, as_texts
from astraflow_dataflow.store.writing import Argument


class AdminStore:
    """Traces and dead letters."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def trace(self, run_id: str, task_id: str) -> StoredTrace:
        """Return what is kept of a task; `known` says whether there ever was one."""
        known, fields, deadline, entries = as_list(
            await self._connection.call(Keys(run_id), "trace", task_id)
        )
        state, attempt, size, left, lane, why, avoid, _ = as_list(fields)
        return StoredTrace(
            task_id=task_id,
            known=as_text(known) == "1",
            state=as_text(state),
            attempt=as_int(attempt),
            group_size=as_int(size),
            missing=as_int(left),
            lane=as_text(lane),
            why=as_text(why),
            refused_by=tuple(dict.fromkeys(filter(None, as_text(avoid).split("\n")))),
            deadline_ms=int(float(as_text(deadline) or 0)),
            entries=tuple(as_texts(entries)),
        )

    async def refused(self, run_id: str, node_ids: Sequence[str]) -> Refused:
        """Return the tasks that all of these nodes refused; none without nodes."""
        if not node_ids:
            return Refused()
        count, example, since = as_list(await self._connection.call(Keys(run_id), "refused", *node_ids))
        return Refused(count=as_int(count), example=as_text(example), since_ms=as_int(since))

    async def dead_letters(
        self, run_id: str, *, after: str, limit: int, with_tasks: bool = True
    ) -> list[pb.DeadLetter]:
        """Return letters after an id (empty for the first), oldest first."""
        key = Keys(run_id).of("dead")
        start = f"({after}" if after else "-"
        reply = await self._connection.raw("XRANGE", key, start, "+", "COUNT", limit)
        return [_letter(key, entry, with_task=with_tasks) for entry in as_list(reply)]

    async def num_dead_letters(self, run_id: str) -> int:
        """Return how many letters there are."""
        return as_int(await self._connection.raw("XLEN", Keys(run_id).of("dead")))

    async def events(self, run_id: str, *, before: str, limit: int) -> list[pb.RunEvent]:
        """Return what happened to the run before an id (empty for now), newest first."""
        if before and not before.strip("0-"):  # nothing is before the first id, and Redis refuses to look
            return []
        key, end = Keys(run_id).of("history"), f"({before}" if before else "+"
        reply = await self._connection.raw("XREVRANGE", key, end, "-", "COUNT", limit)
        return [_event(*as_list(entry)) for entry in as_list(reply)]

    async def steps(self, run_id: str, policy_id: str, *, after: int, limit: int) -> list[StepFigures]:
        """Return what is kept of steps after one, in order; none of a policy that has not finished one."""
        return await self._steps(run_id, policy_id, "XRANGE", f"({after}-1", "+", "COUNT", limit)

    async def newest_steps(self, run_id: str, policy_id: str, *, limit: int) -> list[StepFigures]:
        """Return what is kept of the newest steps, in order."""
        return (await self._steps(run_id, policy_id, "XREVRANGE", "+", "-", "COUNT", limit))[::-1]

    async def _steps(
        self, run_id: str, policy_id: str, command: str, *arguments: Argument
    ) -> list[StepFigures]:
        keys = Keys(run_id)
        commands: tuple[tuple[Argument, ...], ...] = (
            (command, keys.of("series", policy_id), *arguments),
            ("HGETALL", keys.of("series_names", policy_id)),
        )
        reply, sets = await self._connection.raw_many(commands)
        names = {number: tuple(text.split("\n")) for text, number in as_mapping(sets).items()}
        return [_step(*as_list(entry), names=names) for entry in as_list(reply)]

    async def num_steps(self, run_id: str, policy_id: str) -> tuple[int, int]:
        """Return the first step that is kept and the last one; 0 and 0 without any."""
        key = Keys(run_id).of("series", policy_id)
        first, last = await self._connection.raw_many(
            (("XRANGE", key, "-", "+", "COUNT", 1), ("XREVRANGE", key, "+", "-", "COUNT", 1))
        )
        entries = [*as_list(first), *as_list(last)]
        steps = [int(as_text(as_list(entry)[0]).partition("-")[0]) for entry in entries]
        return (steps[0], steps[1]) if steps else (0, 0)

    async def failures(self, run_id: str) -> list[TaskFailures]:
        """Return the failures of tasks by kind, those that last longest in a row first."""
        return failures_of(as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of("failures"))))

    async def requeue(self, run_id: str, letter_ids: Sequence[str]) -> pb.RequeueDeadLettersResponse:
        """Put dead tasks back into their lane; the oldest ones without ids. Raises PreconditionError when the run
        takes no tasks any more.
        """
        reply = as_list(await self._connection.call(Keys(run_id), "requeue", *letter_ids))
        return pb.RequeueDeadLettersResponse(
            requeued=as_int(reply[0]), unknown=as_int(reply[1]), kept=as_int(reply[2])
        )

    async def purge(self, run_id: str, letter_ids: Sequence[str]) -> int:
        """Forget letters; all without ids. Returns how many."""
        return as_int(await self._connection.call(Keys(run_id), "purge", *letter_ids))


def failures_of(fields: Mapping[str, bytes]) -> list[TaskFailures]:
    """Read the hash that `note_failure` writes."""
    found = [_failures(name.removeprefix("first "), fields) for name in fields if name.startswith("first ")]
    return sorted(found, key=lambda item: (-item.in_a_row, -item.count))


def _failures(kind: str, fields: Mapping[str, bytes]) -> TaskFailures:
    first_ms, node_id, task_id, reason, detail = as_text(fields[f"first {kind}"]).split("\n", 4)
    rows = [
        as_int(fields.get(f"row {purpose} {kind}"))
        for purpose in {name.split(" ")[1] for name in fields if name.startswith("after ")}
        if as_int(fields.get(f"after {purpose} {kind}")) == as_int(fields.get(f"completed {purpose}"))
    ]
    return TaskFailures(
        reason=reason,
        detail=detail,
        count=as_int(fields[f"count {kind}"]),
        in_a_row=max(rows, default=0),
        task_id=task_id,
        node_id=node_id,
        first_ms=int(first_ms),
        last_ms=as_int(fields[f"last {kind}"]),
    )


def _letter(key: str, entry: Reply, *, with_task: bool) -> pb.DeadLetter:
    letter_id, flat = as_list(entry)
    name, fields = as_text(letter_id), as_mapping(flat)
    return pb.DeadLetter(
        dead_letter_id=name,
        task_id=as_text(fields["task"]),
        reason=as_text(fields["reason"]),
        detail=as_text(fields["detail"]),
        attempt=as_int(fields["attempt"]),
        node_id=as_text(fields["node"]),
        create_time=timestamp(int(name.partition("-")[0])),
        task=Task.FromString(fields["spec"]) if with_task else None,
        payload_ref=f"{key} {name}",
        evaluation_id=as_text(fields["evaluation"]),
    )


def _event(event_id: Reply, flat: Reply) -> pb.RunEvent:
    name, fields = as_text(event_id), as_mapping(flat)
    return pb.RunEvent(
        event_id=name,
        time=timestamp(int(name.partition("-")[0])),
        kind=as_text(fields["kind"]),
        subject=as_text(fields["subject"]),
        detail=as_bytes(fields["detail"]).decode(errors="replace"),
    )


def _step(entry_id: Reply, flat: Reply, *, names: Mapping[bytes, tuple[str, ...]]) -> StepFigures:
    fields = as_mapping(flat)
    held = names.get(fields["names"], ()) if fields["values"] else ()
    return StepFigures(
        step=int(as_text(entry_id).partition("-")[0]),
        finish_ms=as_int(fields["ms"]),
        names=held,
        values=fields["values"] if held else b"",
        counts=as_text(fields["counts"]),
        is_nameless=bool(fields["values"]) and not held,
    )
