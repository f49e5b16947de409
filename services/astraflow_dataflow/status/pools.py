"""Pools: what groups of nodes do and could do, for autoscalers.

Pure; called by the admin service.
"""

from __future__ import annotations

from collections.abc import Sequence

from astraflow.dataflow.v1 import admin_service_pb2
from astraflow_dataflow.records import Audit, Life


def pool_report(
    audit: Audit, nodes: Sequence[admin_service_pb2.NodeStatus]
) -> admin_service_pb2.PoolReportResponse:
    """Return the load of each pool's connected nodes, and the tasks that more of them could take."""
    pools: dict[str, admin_service_pb2.PoolLoad] = {}
    for node in sorted(nodes, key=lambda node: node.pool):
        pool = pools.setdefault(node.pool, admin_service_pb2.PoolLoad(pool=node.pool))
        pool.leases += node.leases
        if node.connected:
            pool.nodes += 1
            pool.capacity += 0 if node.drain_reason else node.max_concurrent_tasks
    return admin_service_pb2.PoolReportResponse(pools=pools.values(), leasable_tasks=leasable_tasks(audit))


def leasable_tasks(audit: Audit) -> int:
    """Return the training tasks that could be leased now: those tried again hold their place in the window already."""
    if audit.life is not Life.ACTIVE or any(policy.lacks_version for policy in audit.policies):
        return 0
    return audit.retries + min(audit.queued_tasks, audit.admitted)
