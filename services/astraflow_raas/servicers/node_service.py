"""`astraflow.raas.v1.NodeService`: looking at and draining this node. Reads the node, changes nothing but the
drain."""

from collections.abc import Callable
from typing import Any

import grpc

from astraflow.errors import NotFoundError
from astraflow.raas.v1 import node_service_pb2, node_service_pb2_grpc
from astraflow_kit.server_info import server_info
from astraflow_raas.node.node import Node, PolicyParts

_Context = grpc.aio.ServicerContext[Any, Any]


class NodeServicer(node_service_pb2_grpc.NodeServiceServicer):
    """Serves one joined node."""

    def __init__(self, node: Node, *, begin_drain: Callable[[], None]) -> None:
        self._node = node
        self._begin_drain = begin_drain

    async def GetServerInfo(
        self, request: node_service_pb2.GetServerInfoRequest, context: _Context
    ) -> node_service_pb2.GetServerInfoResponse:
        """Who this node is."""
        return node_service_pb2.GetServerInfoResponse(server=server_info())

    async def Status(
        self, request: node_service_pb2.StatusRequest, context: _Context
    ) -> node_service_pb2.StatusResponse:
        """What the node does."""
        return node_status(self._node)

    async def Drain(
        self, request: node_service_pb2.DrainRequest, context: _Context
    ) -> node_service_pb2.DrainResponse:
        """Start a drain."""
        leases = self._node.worker.num_held
        self._begin_drain()
        return node_service_pb2.DrainResponse(leases=leases)

    async def ListVersions(
        self, request: node_service_pb2.ListVersionsRequest, context: _Context
    ) -> node_service_pb2.ListVersionsResponse:
        """Versions this node has."""
        parts = self._node.policies.parts
        if request.policy_id and request.policy_id not in parts:
            raise NotFoundError(
                f"node {self._node.node_id} serves no policy {request.policy_id!r}; it serves {', '.join(parts)}"
            )
        names = [request.policy_id] if request.policy_id else sorted(parts)
        found = [version for name in names for version in _versions(name, parts[name])]
        return node_service_pb2.ListVersionsResponse(versions=found)


def _versions(name: str, part: PolicyParts) -> list[node_service_pb2.NodeVersion]:
    mirrored = part.weights.source.version
    serving = part.policy.version if part.policy.is_served else None
    newest = part.weights.announced_version
    known = {number for number in (mirrored, serving, newest) if number is not None}
    return [
        node_service_pb2.NodeVersion(
            policy_id=name,
            version=number,
            serving=number == serving,
            mirrored=number == mirrored,
            newest_announced=number == newest,
        )
        for number in sorted(known, reverse=True)
    ]


def node_status(node: Node) -> node_service_pb2.StatusResponse:
    """The node's state as the contract's message; also shown by the /status page."""
    return node_service_pb2.StatusResponse(
        node_id=node.node_id,
        run_id=node.run_id,
        leases=node.worker.num_held,
        episodes_running=node.session.num_running,
        episodes_unacked=node.pusher.num_unacked,
        tokens=node.policies.tokens_sampled,
        engine_restarts=node.policies.engine_restarts,
        policies=[_served(name, part) for name, part in sorted(node.policies.parts.items())],
        waiting_for=node.waiting_for,
        draining=node.worker.draining,
        max_episodes=node.load.allowance.episodes,
        bounded_by=node.load.allowance.bounded_by,
        engine_loads=node.load.loads,
    )


def _served(name: str, part: PolicyParts) -> node_service_pb2.ServedPolicy:
    fetched = part.weights.source.counts
    return node_service_pb2.ServedPolicy(
        policy_id=name,
        version=part.policy.version,
        mirror_version=part.weights.source.version,
        snapshots_fetched=fetched.snapshots_fetched,
        deltas_fetched=fetched.deltas_fetched,
        snapshot_bytes_fetched=fetched.snapshot_bytes,
        delta_bytes_fetched=fetched.delta_bytes,
        verification_failures=part.weights.num_verification_failures,
        engines=[
            node_service_pb2.PolicyEngine(
                version=replica.version if replica.engine is not None else None,
                calls=replica.num_calls,
                restarts=host.num_restarts,
            )
            for replica, host in zip(part.policy.engines, part.hosts, strict=True)
        ],
    )
