"""Leasing: which tasks a node gets, as the contract's Lease messages.

Evaluation leases of exactly the versions a node serves come first, then training within admission; both in
one atomic call. A sampling seed per task is derived from the run's seed, so a re-leased task samples the
same. Called by working sessions and by the task service.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.dataflow.v1 import task_service_pb2
from astraflow.errors import FencedError
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import Offer
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.failures import kind_of
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger, without_secrets
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)

UNBOUNDED = 1_000_000
LEASES_PER_CALL = 256
FREE_REASONS = frozenset(
    {"missing_capability", "drain", "version_unavailable", "engine_down", "environment_unavailable"}
)
"""Failures that cost no attempt: the node cannot help it."""
_BACKOFF_S = {
    "version_unavailable": 0.2,
    "environment_unavailable": 1.0,
    "missing_capability": 0.0,
    "drain": 0.0,
}
_RETRY_BACKOFF_S = 0.1


@dataclass(frozen=True)
class Leasing:
    """Gives leases and takes them back."""

    store: Store
    metrics: Metrics

    async def lease(
        self,
        context: RunContext,
        *,
        node_id: str,
        want: int,
        serving: Mapping[str, int],
        max_held: int = UNBOUNDED,
        session: str = "",
    ) -> Offer:
        """Return leases and why there are not more. Raises FencedError when another stream took the session over."""
        flow = context.recipe.dataflow
        offer = await self.store.tasks.lease(
            context.run_id,
            node_id=node_id,
            want=min(want, LEASES_PER_CALL),
            ttl_s=flow.lease_ttl_s,
            horizon_s=flow.group_deadline_s,
            max_held=max_held,
            serving=serving,
            session=session,
        )
        if offer.waiting_for == "session_replaced":
            raise FencedError(
                f"node {node_id} opened another working session; this one is over, use one stream per node"
            )
        for lease in offer.leases:
            is_evaluation = lease.task.purpose == task_pb2.PURPOSE_EVALUATION
            purpose = "evaluation" if is_evaluation else "training"
            self.metrics.increment("astraflow_dataflow_leases_total", purpose=purpose)
            complete(lease, context)
        if offer.leases:
            failpoints.hit("dataflow.leased")
        return offer

    async def renew(self, context: RunContext, *, node_id: str, lease_ids: list[str]) -> list[str]:
        """Extend leases; return those that are lost."""
        ttl_s = context.recipe.dataflow.lease_ttl_s
        return await self.store.tasks.renew(context.run_id, node_id=node_id, lease_ids=lease_ids, ttl_s=ttl_s)

    async def fail(
        self, context: RunContext, failure: task_service_pb2.LeaseFailure, *, node_id: str
    ) -> bool:
        """Give a lease back; return whether the task will be leased again."""
        reason = failure.reason = failure.reason or "unspecified"
        failure.detail = without_secrets(failure.detail)
        task_id = failure.lease_id.rpartition("#")[0]
        requeued = await self.store.tasks.fail(
            context.run_id,
            failure,
            node_id=node_id,
            free=reason in FREE_REASONS,
            backoff_s=_BACKOFF_S.get(reason, _RETRY_BACKOFF_S),
            kind=kind_of(reason, failure.detail, task_id=task_id),
        )
        log.info(
            "lease.given_back", node_id=node_id, lease_id=failure.lease_id, reason=reason, requeued=requeued
        )
        return requeued


def complete(lease: task_pb2.Lease, context: RunContext) -> None:
    """Fill in what the run says of a lease: sampling, seed, time to live and the versions it demands."""
    lease.run_id = context.run_id
    lease.ttl_duration.FromMilliseconds(int(context.recipe.dataflow.lease_ttl_s * 1000))
    lease.seed = task_seed(context.recipe.run.seed, lease.task.task_id)
    demand = evaluation.demand_of(lease.task.task_id, context.trained_policies)
    lease.required_versions.update(demand)
    for policy_id, policy in context.recipe.policies.items():
        lease.sampling[policy_id].CopyFrom(task_pb2.SamplingParams(**policy.sampling.model_dump()))


def task_seed(run_seed: int, task_id: str) -> int:
    """Return the seed of a task: a pure function of run seed and task id, in [0, 2^63)."""
    digest = hashlib.blake2b(f"{run_seed}/{task_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
