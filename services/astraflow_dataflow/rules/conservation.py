"""The conservation law: every ingested trajectory is in exactly one place.

ingested = trained + in_batch + ready + assembling + Σ dropped + evaluated, where the live places are recounted from the
stored groups and batches and `trained` from the consumed log, so a counter that drifts shows as an error instead of
hiding it. Pure; called by reporting and by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from astraflow_dataflow.records import Audit

_DROPPED = "dropped:"


@dataclass(frozen=True, kw_only=True)
class Account:
    """Trajectories of a run by place; `error` is 0 unless there is a defect."""

    ingested: int
    trained: int
    in_batch: int
    ready: int
    assembling: int
    dropped: Mapping[str, int]
    evaluated: int
    error: int


def balance(audit: Audit, *, trained_in_log: int) -> Account:
    """Return the account of one snapshot; `trained_in_log` is the sum of the consumed log at that moment."""
    counters = audit.counters
    dropped = _dropped(counters)
    ingested, evaluated = counters.get("ingested", 0), counters.get("evaluated", 0)
    held = trained_in_log + audit.held_in_batch + audit.held_ready + audit.held_assembling
    return Account(
        ingested=ingested,
        trained=trained_in_log,
        in_batch=audit.held_in_batch,
        ready=audit.held_ready,
        assembling=audit.held_assembling,
        dropped=dropped,
        evaluated=evaluated,
        error=ingested - held - sum(dropped.values()) - evaluated,
    )


def last_account(counters: Mapping[str, int]) -> Account:
    """Return the account of a run that was deleted, from its counters alone: nothing live is left."""
    dropped = _dropped(counters)
    ingested, trained = counters.get("ingested", 0), counters.get("trained", 0)
    evaluated = counters.get("evaluated", 0)
    return Account(
        ingested=ingested,
        trained=trained,
        in_batch=0,
        ready=0,
        assembling=0,
        dropped=dropped,
        evaluated=evaluated,
        error=ingested - trained - evaluated - sum(dropped.values()),
    )


def drift(audit: Audit, *, trained_in_log: int) -> dict[str, int]:
    """Return counter − recount of each live place; all zeros unless there is a defect."""
    counters = audit.counters
    return {
        "trained": counters.get("trained", 0) - trained_in_log,
        "in_batch": counters.get("in_batch", 0) - audit.held_in_batch,
        "ready": counters.get("ready", 0) - audit.held_ready,
        "assembling": counters.get("assembling", 0) - audit.held_assembling,
    }


def _dropped(counters: Mapping[str, int]) -> dict[str, int]:
    return {
        name.removeprefix(_DROPPED): count
        for name, count in sorted(counters.items())
        if name.startswith(_DROPPED)
    }
