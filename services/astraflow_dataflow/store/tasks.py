"""Task lanes and leases in Redis. Called by leasing, curation and the run loop."""

from collections.abc import Mapping, Sequence
from hashlib import sha256

from astraflow.dataflow.v1.task_service_pb2 import LeaseFailure
from astraflow.errors import ConflictError
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import NO_HEDGES, Hedging, Offer, Pace, Supply
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import Reply, as_bytes, as_int, as_list, as_ms, as_text, as_texts, flag
from astraflow_dataflow.store.writing import Argument

_DIGEST_BYTES = 8


class TaskStore:
    """Task lanes and leases."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def submit(self, run_id: str, tasks: Sequence[task_pb2.Task]) -> int:
        """Add tasks to the training lane. Returns how many were new.

        Raises PreconditionError when the run finishes, ConflictError, and adds none, when others have their ids.
        """
        added, *differing = as_list(await self._connection.call(Keys(run_id), "submit", *flat(tasks)))
        if differing:
            raise _conflict(tasks, task_id=as_text(differing[0]), spec=as_bytes(differing[1]))
        return as_int(added)

    async def feed(
        self,
        run_id: str,
        *,
        expected_cursor: int,
        next_cursor: int,
        exhausted: bool,
        tasks: Sequence[task_pb2.Task],
    ) -> tuple[int, list[str]]:
        """Add the data set's next tasks and move its cursor. Returns how many the run did not have, -1 when another
        server was first, and those that are left out because other tasks have their ids.
        """
        reply = await self._connection.call(
            Keys(run_id), "feed", expected_cursor, next_cursor, flag(exhausted), *flat(tasks)
        )
        added, *left_out = as_list(reply)
        return as_int(added), [as_text(task_id) for task_id in left_out]

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
        arguments: list[Argument] = [node_id, want, as_ms(ttl_s), as_ms(horizon_s), max_held, max_fresh]
        arguments += [100 * request_share, session, as_ms(hedging.after_s), hedging.max_share]
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
            reply = await self._connection.call(Keys(run_id), "renew", node_id, as_ms(ttl_s), *chunk)
            lost += as_texts(reply)
        return lost

    async def fail(
        self, run_id: str, failure: LeaseFailure, *, node_id: str, free: bool, backoff_s: float, kind: str
    ) -> bool:
        """Give a lease back; `free` costs no attempt, and else it counts among failures of its `kind`.

        Returns whether the task will be leased again.
        """
        arguments = (failure.lease_id, failure.reason, failure.detail, flag(failure.retryable), flag(free))
        reply = await self._connection.call(Keys(run_id), "fail", node_id, *arguments, as_ms(backoff_s), kind)
        return as_int(reply) == 1

    async def sweep(self, run_id: str, *, limit: int) -> tuple[int, int]:
        """Expire leases and groups whose time is over. Returns (leases, groups)."""
        reply = as_list(await self._connection.call(Keys(run_id), "sweep", limit))
        return as_int(reply[0]), as_int(reply[1])

    async def close_training(self, run_id: str, *, limit: int) -> int:
        """Close admitted training tasks of a finishing run. Returns how many."""
        return as_int(await self._connection.call(Keys(run_id), "close_training", limit))


def flat(tasks: Sequence[task_pb2.Task]) -> list[Argument]:
    """Return what the functions that add tasks take of each."""
    parts = list[Argument]()
    for task in tasks:
        spec = task.SerializeToString()
        parts += (task.task_id, task.group_size, spec, task.priority, sha256(spec).digest()[:_DIGEST_BYTES])
    return parts


def _conflict(tasks: Sequence[task_pb2.Task], *, task_id: str, spec: bytes) -> ConflictError:
    """`spec` is of the task that has the id, empty once it is done; the last one submitted that differs is refused."""
    there = task_pb2.Task.FromString(spec)
    given = next(task for task in reversed(tasks) if task.task_id == task_id and (task != there or not spec))
    names = [field.name for field in there.DESCRIPTOR.fields]
    differing = ", ".join(name for name in names if getattr(there, name) != getattr(given, name))
    what = (
        f"it differs in {differing}"
        if spec
        else "that one is done, and only a digest is left of it, which does not say which fields differ"
    )
    return ConflictError(
        f"task {task_id} exists with other content: {what}; submit other content under an id of its own",
        metadata={"task_id": task_id, "field": differing if spec else ""},
    )


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
