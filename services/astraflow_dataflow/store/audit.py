"""Trajectory counts and wake-up events read from Redis.

`audit` is one atomic snapshot: the counters and, beside them, what the stored groups and batches really hold. Called by
reporting and by the event reader.
"""

from __future__ import annotations

from collections.abc import Mapping

from astraflow_dataflow.records import Audit, Event, Life, PolicyState, TrainerReport
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import Reply, as_int, as_list, as_mapping, as_text

_EVENTS_PER_READ = 256


class AuditStore:
    """Read-only views of a whole run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._trained: dict[str, tuple[str, int]] = {}

    async def audit(self, run_id: str) -> Audit:
        """Return the snapshot. O(open tasks + ready groups + bound groups)."""
        reply = as_list(await self._connection.call(Keys(run_id), "audit"))
        held = [as_int(item) for item in as_list(reply[3])]
        return Audit(
            now_ms=as_int(reply[0]),
            life=Life(as_text(reply[1]) or "active"),
            counters={name: int(value) for name, value in as_mapping(reply[2]).items()},
            held_assembling=held[0],
            held_ready=held[1],
            held_in_batch=held[2],
            dead_letters=as_int(reply[4]),
            queued_tasks=as_int(reply[5]),
            exhausted=as_text(reply[6]) == "1",
            retries=as_int(reply[7]),
            policies=tuple(_policy_state(item) for item in as_list(reply[8])),
            admitted=as_int(reply[9]),
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

    async def events(self, run_id: str, *, after: str, block_s: float) -> tuple[str, list[Event]]:
        """Return (id of the last event, events after `after`), waiting up to `block_s` for the first."""
        entries = await self._connection.read_stream(
            Keys(run_id).of("events"), after=after, block_ms=int(block_s * 1000), limit=_EVENTS_PER_READ
        )
        last = entries[-1][0] if entries else after
        return last, [Event(topic=fields.pop("topic"), fields=fields) for _, fields in entries]

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
