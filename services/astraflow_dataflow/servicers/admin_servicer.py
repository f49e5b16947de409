"""AdminService: looking at a run from outside."""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import admin_service_pb2_grpc
from astraflow_dataflow.reporting import Reporting
from astraflow_dataflow.runs import RunRegistry
from astraflow_kit.serve import Context


@dataclass(frozen=True)
class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Serves AdminService."""

    registry: RunRegistry
    reporting: Reporting

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return await self.reporting.status(await self.registry.get(request.run_id))
