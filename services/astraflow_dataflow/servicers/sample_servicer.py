"""SampleService: reading the archive of a run."""

from dataclasses import dataclass

from astraflow.dataflow.v1 import sample_service_pb2 as pb
from astraflow.dataflow.v1 import sample_service_pb2_grpc
from astraflow_dataflow.episodes.archiving import Archives
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.servicers.defaults import page_size
from astraflow_kit.serve import Context


@dataclass(frozen=True)
class SampleServicer(sample_service_pb2_grpc.SampleServiceServicer):
    """Serves SampleService."""

    registry: RunRegistry
    archives: Archives

    async def ListSamples(self, request: pb.ListSamplesRequest, context: Context) -> pb.ListSamplesResponse:
        run = await self.registry.get(request.run_id)
        if request.policy_id:
            run.require_policy(request.policy_id)
        archive = await self.archives.of(run)
        return await self.archives.in_thread(lambda: archive.page(request, size=page_size(request)))

    async def GetSamples(self, request: pb.GetSamplesRequest, context: Context) -> pb.GetSamplesResponse:
        run = await self.registry.get(request.run_id)
        archive = await self.archives.of(run)
        return await self.archives.in_thread(lambda: archive.contents(request.sample_ids))
