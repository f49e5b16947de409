"""Pools: what groups of nodes do and could do, for autoscalers.

Pure; called by `reporting` and `scaler_servicer`.
"""

from collections.abc import Sequence

from astraflow.dataflow.v1 import admin_service_pb2
from astraflow_dataflow.records import Audit, Life


def pool_report(
    audit: Audit,
    nodes: Sequence[admin_service_pb2.NodeStatus],
    autoscaling: admin_service_pb2.Autoscaling | None = None,
) -> admin_service_pb2.PoolReportResponse:
    """Return the load of each pool's connected nodes, the tasks that more of them could take, and the targets."""
    targets = autoscaling.pools if autoscaling is not None else {}
    pools = {
        name: admin_service_pb2.PoolLoad(pool=name, target_nodes=wanted) for name, wanted in targets.items()
    }
    for node in nodes:
        pool = pools.setdefault(node.pool, admin_service_pb2.PoolLoad(pool=node.pool))
        pool.leases += node.leases
        if node.connected:
            pool.nodes += 1
            pool.capacity += 0 if node.drain_reason else node.max_concurrent_tasks
    return admin_service_pb2.PoolReportResponse(
        pools=sorted(pools.values(), key=lambda pool: pool.pool),
        leasable_tasks=leasable_tasks(audit),
        autoscaling=autoscaling,
    )


def leasable_tasks(audit: Audit) -> int:
    """Return the training tasks that could be leased now: those tried again hold their place in the window already."""
    if audit.life is not Life.ACTIVE or any(policy.lacks_version for policy in audit.policies):
        return 0
    found = audit.retries + min(audit.queued_tasks, audit.admitted)
    return found if audit.quota_left is None else min(found, audit.quota_left)


def nodes_wanted(
    report: admin_service_pb2.PoolReportResponse,
    pool: str,
    *,
    tasks_per_node: float,
    share: float = 1.0,
) -> float:
    """Return the pool's target; without one how many nodes of `tasks_per_node` tasks each it could keep busy with the
    tasks that it holds and its `share` of those that could be leased now.
    """
    load = load_of(report, pool)
    if load.HasField("target_nodes"):
        return float(load.target_nodes)
    return (load.leases + share * report.leasable_tasks) / tasks_per_node


def load_of(report: admin_service_pb2.PoolReportResponse, pool: str) -> admin_service_pb2.PoolLoad:
    """Return the load of one pool; of one without nodes an empty one."""
    none = admin_service_pb2.PoolLoad(pool=pool)
    return next((load for load in report.pools if load.pool == pool), none)
