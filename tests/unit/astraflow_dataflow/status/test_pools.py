"""Pools add up their connected nodes, and leasable tasks are those a window has room for."""

from dataclasses import replace

from astraflow_dataflow.records import Life
from astraflow_dataflow.status.pools import leasable_tasks, pool_report
from support.dataflow_snapshots import AUDIT, POLICY, node


def test_a_pool_counts_its_connected_nodes_and_all_leases() -> None:
    nodes = [
        node(node_id="a", pool="spot", max_concurrent_tasks=4, leases=1),
        node(node_id="b", pool="spot", max_concurrent_tasks=4, leases=2, connected=False),
        node(node_id="c", pool="spot", max_concurrent_tasks=8, drain_reason="operator"),
        node(node_id="d", max_concurrent_tasks=2),
    ]
    loads = [(pool.pool, pool.nodes, pool.capacity, pool.leases) for pool in pool_report(AUDIT, nodes).pools]
    assert loads == [("", 1, 2, 0), ("spot", 2, 4, 3)]


def test_leasable_is_what_waits_within_the_window() -> None:
    roomy = replace(AUDIT, admitted=3)
    assert leasable_tasks(replace(roomy, queued_tasks=9, retries=2)) == 5
    assert leasable_tasks(replace(roomy, queued_tasks=1, retries=0)) == 1
    assert leasable_tasks(replace(roomy, queued_tasks=9, retries=2, leases=3, max_leases=7)) == 4
    assert leasable_tasks(replace(roomy, queued_tasks=9, policies=(replace(POLICY, version=None),))) == 0
    assert leasable_tasks(replace(AUDIT, queued_tasks=9, life=Life.FINISHING)) == 0
