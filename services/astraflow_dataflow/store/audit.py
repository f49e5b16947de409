"""Trajectory counts and wake-up events read from Redis.

`audit` is one atomic snapshot: the counters and, beside them, what the stored groups and batches really hold, as long
as these are few. `recount` counts many in slices, and begins again when something moved meanwhile. Called by reporting
and by the event reader.
"""

from collections import Counter
from collections.abc import Mapping

from astraflow_dataflow.records import (
    Audit,
    Event,
    Life,
    PolicyState,
    Recount,
    RouteCount,
    TrainerReport,
)
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import Reply, as_int, as_list, as_mapping, as_text

_EVENTS_PER_READ = 256
MOST_COUNTED = 500
"""Tasks and groups that one call counts, in a few milliseconds."""
_COUNTED = ("assembling", "ready", "in_batch")
_TRIES = 3


class AuditStore:
    """Read-only views of a whole run."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._trained: dict[str, tuple[str, int]] = {}

    async def audit(self, run_id: str, *, most: int = MOST_COUNTED) -> Audit:
        """Return the snapshot; of a run with `most` tasks and groups or more, what is held is what its counters say."""
        reply = as_list(await self._connection.call(Keys(run_id), "audit", most))
        counters = {name: int(value) for name, value in as_mapping(reply[2]).items()}
        held = [as_int(item) for item in as_list(reply[3])]
        assembling, ready, in_batch = held or [counters.get(place, 0) for place in _COUNTED]
        return Audit(
            now_ms=as_int(reply[0]),
            life=Life(as_text(reply[1]) or "active"),
            counters=counters,
            is_whole=bool(held),
            held_assembling=assembling,
            held_ready=ready,
            held_in_batch=in_batch,
            dead_letters=as_int(reply[4]),
            queued_tasks=as_int(reply[5]),
            exhausted=as_text(reply[6]) == "1",
            retries=as_int(reply[7]),
            policies=tuple(_policy_state(item) for item in as_list(reply[8])),
            admitted=as_int(reply[9]),
            leases=as_int(reply[10]),
            max_leases=as_int(reply[11]),
        )

    async def recount(self, run_id: str, *, most: int = MOST_COUNTED) -> Recount | None:
        """Count what the stored tasks and groups hold, `most` of them in a call. None when they never stood still."""
        for _ in range(_TRIES):
            if (found := await self._recount(run_id, most)) is not None:
                return found
        return None

    async def _recount(self, run_id: str, most: int) -> Recount | None:
        moves, place, behind = None, 1, 0
        held, charged = Counter[str](), Counter[str]()
        while place:
            reply = as_list(await self._connection.call(Keys(run_id), "recount", most, place, behind))
            if moves not in (None, reply[0]):
                return None
            moves, place, behind = reply[0], as_int(reply[1]), as_int(reply[2])
            held.update(dict(zip(_COUNTED, map(as_int, as_list(reply[3])), strict=True)))
            counted = dict(zip(_COUNTED, map(as_int, as_list(reply[4])), strict=True))
            credit = [as_list(item) for item in as_list(reply[5])]
            charged.update({as_text(policy): as_int(stored) for policy, stored, _ in credit})
        return Recount(
            drift={name: counted[name] - held[name] for name in _COUNTED},
            credit={as_text(policy): as_int(n) - charged[as_text(policy)] for policy, _, n in credit},
        )

    async def trained_in_log(self, run_id: str, policy_id: str, *, through: str) -> int:
        """Return the trajectories of trained steps, summed from the consumed log up to entry `through`; empty is
        the beginning. Reads only what is new, or all of it when Redis lost what was read before.
        """
        key = Keys(run_id).of("consumed", policy_id)
        last, total = self._trained.get(key, ("", 0)) if through else ("", 0)
        while last != through:
            entries = as_list(await self._connection.raw("XRANGE", key, last or "-", through, "COUNT", 1000))
            found = [(as_text(entry), as_mapping(fields)) for entry, fields in map(as_list, entries)]
            if last and (not found or found[0][0] != last):
                last, total = "", 0  # a Redis that lost it, or an audit of before that entry
                continue
            fresh = found[1:] if last else found
            if not fresh:
                break
            total += sum(int(step["n"]) for _, step in fresh if step["stage"] == b"trained")
            last = fresh[-1][0]
        self._trained[key] = (last, total)
        return total

    async def routed(self, run_id: str) -> list[RouteCount]:
        """Return what routes took elsewhere, by verdict and policy."""
        stored = as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of("routed")))
        return [
            RouteCount(
                verdict=at.partition(" ")[0],
                policy_id=at.partition(" ")[2],
                groups=int(stored[f"g {at}"]),
                trajectories=int(stored[f"n {at}"]),
                reward_sum=float(stored[f"r {at}"]),
            )
            for at in sorted(name[2:] for name in stored if name.startswith("g "))
        ]

    async def events(self, run_id: str, *, after: str, block_s: float) -> tuple[str, list[Event]]:
        """Return (id of the last event, events after `after`), waiting up to `block_s` for the first."""
        entries = await self._connection.read_stream(
            Keys(run_id).of("events"), after=after, block_ms=int(block_s * 1000), limit=_EVENTS_PER_READ
        )
        last = entries[-1][0] if entries else after
        return last, [
            Event(topic=topic, fields={name: value for name, value in fields.items() if name != "topic"})
            for _, fields in entries
            for topic in fields["topic"].split("\n")
        ]

    async def newest_event(self, run_id: str) -> str:
        """Return the id of the newest event, from which a reader goes on."""
        entries = as_list(
            await self._connection.raw("XREVRANGE", Keys(run_id).of("events"), "+", "-", "COUNT", 1)
        )
        return as_text(as_list(entries[0])[0]) if entries else "0"


def _policy_state(reply: Reply) -> PolicyState:
    fields = as_list(reply)
    stored = as_mapping(fields[5])
    version = as_text(stored.get("version"))
    return PolicyState(
        policy_id=as_text(fields[0]),
        frozen=as_text(stored.get("frozen")) == "1",
        external=as_text(stored.get("external")) == "1",
        outstanding=as_int(fields[1]),
        ready=as_int(fields[2]),
        unpublished=as_int(fields[3]),
        credit=as_int(fields[4]),
        acceptance=float(stored["acceptance"]),
        groups_per_step=int(stored["groups_per_step"]),
        epoch=int(stored["epoch"]),
        finished_step=int(stored["finished"]),
        durable_step=int(stored["durable"]),
        version=int(version) if version else None,
        finish_ms=as_int(stored.get("finish_ms")),
        wait=as_text(stored.get("wait")),
        wait_since_ms=as_int(stored.get("wait_since")),
        wait_until_ms=as_int(stored.get("wait_until")),
        waited_ms=as_int(stored.get("waited")),
        lack=as_text(stored.get("lack")),
        staleness={int(age): int(count) for age, count in as_mapping(fields[6]).items()},
        recent=tuple(_recent(as_text(item)) for item in as_list(fields[7])),
        unpublished_steps=tuple(sorted(int(step) for step in as_mapping(fields[8]))),
        last_consumed=as_text(fields[10]),
        charged=as_int(fields[11]),
        max_staleness=int(stored["max_staleness"]),
        no_credit=as_int(stored.get("no_credit")),
        settled=as_int(stored.get("settled")),
        trainer=as_text(stored.get("trainer")),
        heard_ms=as_int(stored.get("heard_ms")),
        report=_report(stored),
        doubt=as_text(stored.get("doubt")),
        turn=as_text(fields[12]),
        turn_ends_step=as_int(fields[13]),
        held=as_text(fields[14]),
    )


def _report(stored: Mapping[str, Reply]) -> TrainerReport | None:
    reason, progress = as_text(stored.get("reported")), as_text(stored.get("reported_progress"))
    if not reason:
        return None
    return TrainerReport(
        reason=reason,
        detail=as_text(stored.get("reported_detail")),
        progress=float(progress) if progress else None,
        since_ms=as_int(stored.get("reported_since")),
        heard_ms=as_int(stored.get("reported_ms")),
    )


def _recent(text: str) -> tuple[float, int]:
    reward_sum, _, count = text.partition(" ")
    return float(reward_sum), int(count)
