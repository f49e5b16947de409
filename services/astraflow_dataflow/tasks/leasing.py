"""Leasing: which tasks a node gets, as the contract's Lease messages.

Evaluation leases of exactly the versions a node serves come first, then training within admission; both in
one atomic call. A sampling seed per task is derived from the run's seed, so a re-leased task samples the
same. Called by working sessions and by the task service.
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from astraflow.dataflow.v1 import task_service_pb2
from astraflow.errors import FencedError, PermissionError_, RetryableError
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import NO_HEDGES, Hedging, Offer
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.failures import kind_of
from astraflow_dataflow.runs.lease_seals import NOT_LEASE_HOLDER, LeaseSeals
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.tasks.pace import most_held, straggles_after_s
from astraflow_kit import failpoints
from astraflow_kit.identity.sealing import Session
from astraflow_kit.log import get_logger, without_secrets
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)

UNBOUNDED = 1_000_000
LEASES_PER_CALL = 256
_LEASES_AT_ONCE = 20
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
_LOOK_LIFE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What was found of the pace of nodes, and until when it holds."""

    until_s: float = -math.inf
    bounds: Mapping[str, int] = field(default_factory=dict)
    """How many tasks slow nodes may hold."""
    hedging: Hedging = NO_HEDGES


@dataclass(frozen=True)
class Leasing:
    """Gives leases and takes them back."""

    store: Store
    metrics: Metrics
    _looks: dict[str, _Look] = field(default_factory=dict)
    """The newest one of each run."""

    async def lease(
        self,
        context: RunContext,
        *,
        node: Session,
        want: int,
        serving: Mapping[str, int],
        max_held: int = UNBOUNDED,
        session: str = "",
    ) -> Offer:
        """Return leases, sealed for the node, and why there are not more. Raises FencedError when another stream took
        the session over.
        """
        flow, look = context.recipe.dataflow, await self._look(context)
        lease_some = partial(
            self.store.tasks.lease,
            context.run_id,
            node_id=node.name,
            ttl_s=flow.lease_ttl_s,
            horizon_s=flow.group_deadline_s,
            max_held=max_held,
            max_fresh=look.bounds.get(node.name, UNBOUNDED),
            serving=serving,
            request_share=flow.evaluation.request_share,
            session=session,
            hedging=look.hedging,
        )
        offer = await _in_slices(lease_some, want=min(want, LEASES_PER_CALL))
        if offer.waiting_for == "session_replaced" and not offer.leases:
            raise FencedError(
                f"node {node.name} opened another working session; this one is over, use one stream per node"
            )
        seals = LeaseSeals(node, context.seal_key)
        for lease in offer.leases:
            is_evaluation = lease.task.purpose == task_pb2.PURPOSE_EVALUATION
            purpose = "evaluation" if is_evaluation else "hedge" if lease.hedge else "training"
            self.metrics.increment("astraflow_dataflow_leases_total", purpose=purpose)
            complete(lease, context)
            context.leased.note(lease)
            lease.lease_id = seals.sealed(lease.lease_id)
        if offer.leases:
            failpoints.hit("dataflow.leased")
        return offer

    async def _look(self, context: RunContext) -> _Look:
        """The pace of the run's nodes; looked at every few seconds at most, and only while nodes ask."""
        run_id, hedge, now_s = (
            context.run_id,
            context.recipe.dataflow.hedge,
            asyncio.get_running_loop().time(),
        )
        look = self._looks.get(run_id, _Look())
        if now_s < look.until_s:
            return look
        work, paces = await self.store.tasks.paces(run_id)
        hedging = NO_HEDGES
        if hedge is not None:
            after_s = straggles_after_s(await self.store.tasks.durations_s(run_id), quantile=hedge.quantile)
            hedging = Hedging(after_s=after_s, max_share=hedge.max_share)
        look = _Look(until_s=now_s + _LOOK_LIFE_S, bounds=most_held(paces, work=work), hedging=hedging)
        self._looks[run_id] = look
        return look

    async def renew(self, context: RunContext, *, node: Session, lease_ids: Sequence[str]) -> list[str]:
        """Extend leases; return those that are lost, or were never this node's."""
        own = self.own(context, lease_ids, node=node)
        ttl_s = context.recipe.dataflow.lease_ttl_s
        lost = await self.store.tasks.renew(
            context.run_id, node_id=node.name, lease_ids=list(own.values()), ttl_s=ttl_s
        )
        return lost_of(lease_ids, own=own, lost=lost)

    def own(self, context: RunContext, lease_ids: Sequence[str], *, node: Session) -> Mapping[str, str]:
        """By their ids the leases, of those that were given to a node; what was not is counted."""
        own = LeaseSeals(node, context.seal_key).own(lease_ids)
        if num_refused := len(set(lease_ids) - own.keys()):
            self.metrics.increment("astraflow_dataflow_refused_leases_total", num_refused)
        return own

    async def fail(
        self, context: RunContext, failure: task_service_pb2.LeaseFailure, *, node: Session
    ) -> bool:
        """Give a lease back; return whether the task will be leased again. Raises PermissionError_ for one that was not
        given to this node.
        """
        lease = LeaseSeals(node, context.seal_key).opened(failure.lease_id)
        if lease is None:
            raise PermissionError_(
                f"lease {failure.lease_id!r} was not given to node {node.name}, so it cannot give it back; send the id "
                "as the server gave it",
                metadata={"reason": NOT_LEASE_HOLDER},
            )
        failure.lease_id = lease
        reason = failure.reason = failure.reason or "unspecified"
        failure.detail = without_secrets(failure.detail)
        task_id = lease.rpartition("#")[0]
        requeued = await self.store.tasks.fail(
            context.run_id,
            failure,
            node_id=node.name,
            free=reason in FREE_REASONS,
            backoff_s=_BACKOFF_S.get(reason, _RETRY_BACKOFF_S),
            kind=kind_of(reason, failure.detail, task_id=task_id),
        )
        log.info(
            "lease.given_back", node_id=node.name, lease_id=failure.lease_id, reason=reason, requeued=requeued
        )
        return requeued


def lost_of(lease_ids: Iterable[str], *, own: Mapping[str, str], lost: Collection[str]) -> list[str]:
    """Return the ids, as the node has them, of leases that were `lost`, and of those that are not its `own`."""
    return [lease_id for lease_id in lease_ids if lease_id not in own or own[lease_id] in lost]


async def _in_slices(lease_some: Callable[..., Awaitable[Offer]], *, want: int) -> Offer:
    """Lease in calls each of which holds Redis for a moment, until one gives less than it was asked for."""
    leases: list[task_pb2.Lease] = []
    while True:
        asked = min(want - len(leases), _LEASES_AT_ONCE)
        try:
            found = await lease_some(want=asked)
        except RetryableError:
            if not leases:
                raise
            return Offer(
                leases=leases, waiting_for=""
            )  # they must not be lost; whoever asks again hears the error
        leases += found.leases
        if len(leases) >= want or len(found.leases) < asked:
            return Offer(leases=leases, waiting_for=found.waiting_for, more=found.more)


def complete(lease: task_pb2.Lease, context: RunContext) -> None:
    """Fill in what the run says of a lease: sampling, seed, time to live and the versions it demands."""
    lease.run_id = context.run_id
    lease.ttl_duration.FromMilliseconds(int(context.recipe.dataflow.lease_ttl_s * 1000))
    lease.seed = task_seed(context.recipe.run.seed, lease.task.task_id)
    demand = evaluation.demand_of(lease.task.task_id, context.trained_policies)
    lease.required_versions.update(demand)
    for policy_id, policy in context.recipe.policies.items():
        lease.sampling[policy_id].CopyFrom(task_pb2.SamplingParams(**policy.sampling.parameters()))


def task_seed(run_seed: int, task_id: str) -> int:
    """Return the seed of a task: a pure function of run seed and task id, in [0, 2^63)."""
    digest = hashlib.blake2b(f"{run_seed}/{task_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
