"""The conservation law: every ingested trajectory is in exactly one place.

ingested = trained + in_batch + ready + assembling + Σ dropped + evaluated, where the live places are recounted from the
stored groups and batches and `trained` from the consumed log, so a counter that drifts shows as an error instead of
hiding it. Pure; called by reporting and by tests.
"""

from collections.abc import Mapping
from dataclasses import replace

from astraflow.dataflow.v1.account_pb2 import TrajectoryAccount
from astraflow_dataflow.records import Audit, Recount

_DROPPED = "dropped:"


def recount(audit: Audit, *, trained_in_log: int) -> TrajectoryAccount:
    """Return where the trajectories of one snapshot are; `trained_in_log` is the sum of the consumed log at that
    moment. `conservation_error` is 0 unless there is a defect.
    """
    return _account(audit.counters, **_recounted(audit, trained_in_log=trained_in_log))


def last_count(counters: Mapping[str, int]) -> TrajectoryAccount:
    """Return where the trajectories of a deleted run ended, from its counters alone: nothing live is left."""
    return _account(counters, trained=counters.get("trained", 0))


def drift(audit: Audit, *, trained_in_log: int) -> dict[str, int]:
    """Return counter − recount of each live place; all zeros unless there is a defect."""
    recounted = _recounted(audit, trained_in_log=trained_in_log)
    return {place: audit.counters.get(place, 0) - held for place, held in recounted.items()}


def corrected(audit: Audit, found: Recount) -> Audit:
    """Return a snapshot that was not counted, with what the newest recount found wrong in the counters."""
    return replace(
        audit,
        held_assembling=audit.held_assembling - found.drift["assembling"],
        held_ready=audit.held_ready - found.drift["ready"],
        held_in_batch=audit.held_in_batch - found.drift["in_batch"],
        policies=tuple(
            replace(policy, charged=policy.outstanding - found.credit.get(policy.policy_id, 0))
            for policy in audit.policies
        ),
    )


def _recounted(audit: Audit, *, trained_in_log: int) -> dict[str, int]:
    return {
        "trained": trained_in_log,
        "in_batch": audit.held_in_batch,
        "ready": audit.held_ready,
        "assembling": audit.held_assembling,
    }


def _account(
    counters: Mapping[str, int], *, trained: int, in_batch: int = 0, ready: int = 0, assembling: int = 0
) -> TrajectoryAccount:
    dropped = {
        name.removeprefix(_DROPPED): count
        for name, count in sorted(counters.items())
        if name.startswith(_DROPPED)
    }
    ingested, evaluated = counters.get("ingested", 0), counters.get("evaluated", 0)
    held = trained + in_batch + ready + assembling
    return TrajectoryAccount(
        ingested=ingested,
        trained=trained,
        in_batch=in_batch,
        ready=ready,
        assembling=assembling,
        dropped=dropped,
        evaluated=evaluated,
        conservation_error=ingested - held - sum(dropped.values()) - evaluated,
    )
