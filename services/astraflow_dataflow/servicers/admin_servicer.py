"""AdminService: looking at a run from outside, and taking care of its nodes and dead letters."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import admin_service_pb2_grpc
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.servicers.defaults import page_size
from astraflow_dataflow.status.last_known import LastKnown
from astraflow_dataflow.status.reporting import Reporting
from astraflow_dataflow.status.step_history import thinned
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.revoked_tokens import RevokedTokens
from astraflow_dataflow.store.store import Store
from astraflow_kit.identity.gate import caller
from astraflow_kit.log import get_logger
from astraflow_kit.serve import Context
from astraflow_kit.server_info import server_info

log = get_logger(__name__)

_INTERVAL_S = 1.0


@dataclass(frozen=True)
class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Serves AdminService."""

    store: Store
    registry: RunRegistry
    reporting: Reporting
    last_known: LastKnown
    durability: Durability
    revoked_tokens: RevokedTokens
    capabilities: Sequence[str]

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(server=server_info(self.capabilities))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return await self.last_known.status(request.run_id)

    async def Watch(
        self, request: pb.AdminServiceWatchRequest, context: Context
    ) -> AsyncIterator[pb.AdminServiceWatchResponse]:
        asked_s = request.interval_duration.ToNanoseconds() / 1e9
        interval_s = asked_s if request.HasField("interval_duration") else _INTERVAL_S
        async for status, changed in self.last_known.watch(request.run_id, interval_s=interval_s):
            yield pb.AdminServiceWatchResponse(status=status, changed=changed)

    async def Why(self, request: pb.WhyRequest, context: Context) -> pb.WhyResponse:
        return await self.last_known.why(request.run_id, request.task_id)

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        run = await self.registry.get(request.run_id)
        size = page_size(request)
        nodes = [node for node in await self.reporting.nodes(run) if node.node_id > request.page_token]
        token = nodes[size - 1].node_id if len(nodes) > size else ""
        return pb.ListNodesResponse(nodes=nodes[:size], next_page_token=token)

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> pb.DrainNodeResponse:
        run = await self.registry.get(request.run_id)
        reason = request.reason or "operator"
        leases, connected = await self.store.nodes.drain(run.run_id, node_id=request.node_id, reason=reason)
        await self.durability.barrier(run.run_id)
        log.info("node.drain_ordered", node_id=request.node_id, reason=reason, leases=leases)
        return pb.DrainNodeResponse(leases=leases, connected=connected)

    async def UndrainNode(self, request: pb.UndrainNodeRequest, context: Context) -> pb.UndrainNodeResponse:
        run = await self.registry.get(request.run_id)
        reason = await self.store.nodes.undrain(run.run_id, node_id=request.node_id)
        await self.durability.barrier(run.run_id)
        log.info("node.undrained", node_id=request.node_id, reason=reason)
        return pb.UndrainNodeResponse(drain_reason=reason)

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: Context
    ) -> pb.ListDeadLettersResponse:
        run = await self.registry.get(request.run_id)
        size = page_size(request)
        found = await self.store.admin.dead_letters(
            run.run_id, after=request.page_token, limit=size + 1, with_tasks=request.include_tasks
        )
        return pb.ListDeadLettersResponse(
            dead_letters=found[:size],
            next_page_token=found[size - 1].dead_letter_id if len(found) > size else "",
            total=await self.store.admin.num_dead_letters(run.run_id),
        )

    async def RequeueDeadLetters(
        self, request: pb.RequeueDeadLettersRequest, context: Context
    ) -> pb.RequeueDeadLettersResponse:
        run = await self.registry.get(request.run_id)
        done = await self.store.admin.requeue(run.run_id, request.dead_letter_ids)
        await self.durability.barrier(run.run_id)
        log.info("dead_letters.requeued", run_id=run.run_id, count=done.requeued)
        return done

    async def PurgeDeadLetters(
        self, request: pb.PurgeDeadLettersRequest, context: Context
    ) -> pb.PurgeDeadLettersResponse:
        run = await self.registry.get(request.run_id)
        purged = await self.store.admin.purge(run.run_id, request.dead_letter_ids)
        await self.durability.barrier(run.run_id)
        log.info("dead_letters.purged", run_id=run.run_id, count=purged)
        return pb.PurgeDeadLettersResponse(purged=purged)

    async def ListSteps(self, request: pb.ListStepsRequest, context: Context) -> pb.ListStepsResponse:
        run = await self.registry.get(request.run_id)
        run.require_policy(request.policy_id)
        columns = await self.reporting.steps.of(run.run_id, request.policy_id)
        return await asyncio.to_thread(thinned, columns, request)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsResponse:
        run, size = await self.registry.get(request.run_id), page_size(request)
        found = await self.store.admin.events(run.run_id, before=request.page_token, limit=size + 1)
        token = found[size - 1].event_id if len(found) > size else ""
        return pb.ListEventsResponse(events=found[:size], next_page_token=token)

    async def PoolReport(self, request: pb.PoolReportRequest, context: Context) -> pb.PoolReportResponse:
        return await self.reporting.pools(await self.registry.get(request.run_id))

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Context) -> pb.RevokeTokenResponse:
        token = request.token
        expires_s = token.expire_time.ToNanoseconds() / 1e9 if token.HasField("expire_time") else math.inf
        was_revoked = await self.revoked_tokens.revoke(token.token_id, expires_s=expires_s)
        await self.durability.barrier("")
        log.info("token.revoked", id=token.token_id, by=caller().subject)
        return pb.RevokeTokenResponse(was_revoked=was_revoked)

    async def ListRevokedTokens(
        self, request: pb.ListRevokedTokensRequest, context: Context
    ) -> pb.ListRevokedTokensResponse:
        return pb.ListRevokedTokensResponse(tokens=await self.revoked_tokens.all())
