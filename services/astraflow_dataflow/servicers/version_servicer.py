"""VersionService: announcing versions and following them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from astraflow.dataflow.v1 import version_service_pb2 as pb
from astraflow.dataflow.v1 import version_service_pb2_grpc
from astraflow.errors import InvalidArgumentError
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.servicers.defaults import page_size
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.versions.announcements import Versions
from astraflow_dataflow.versions.grants import StoreGrants
from astraflow_kit.serve import Context


@dataclass(frozen=True)
class VersionServicer(version_service_pb2_grpc.VersionServiceServicer):
    """Serves VersionService."""

    registry: RunRegistry
    versions: Versions
    durability: Durability
    grants: StoreGrants

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        run = await self.registry.get(request.run_id)
        if request.version.snapshot_of or request.version.snapshot_version:
            raise InvalidArgumentError(
                "the version names snapshot_of or snapshot_version, which are the server's: it draws the versions of "
                "policies that are snapshots; leave both out"
            )
        announced = await self.versions.publish(
            run,
            request.version,
            epoch=request.trainer_epoch,
            num_unreadable_before=request.num_unreadable_before,
        )
        await self.durability.barrier(run.run_id)
        return pb.PublishResponse(version=announced)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        run = await self.registry.get(request.run_id)
        for policy_id in request.policy_ids:
            run.require_policy(policy_id)
        async for version in self.versions.watch(run, list(request.policy_ids) or run.policy_ids):
            yield pb.WatchResponse(version=version)

    async def ListVersions(
        self, request: pb.ListVersionsRequest, context: Context
    ) -> pb.ListVersionsResponse:
        run = await self.registry.get(request.run_id)
        run.require_policy(request.policy_id)
        await self.registry.refresh_versions(run)
        size = page_size(request)
        newest = run.newest_versions[request.policy_id]
        first = min(newest, int(request.page_token or newest))
        numbers = range(first, max(-1, first - size), -1)
        found = await self.versions.store.versions.several(run.run_id, request.policy_id, numbers)
        pins = await self.versions.pins(run.run_id, request.policy_id)
        return pb.ListVersionsResponse(
            versions=found,
            next_page_token=str(first - size) if first - size >= 0 else "",
            pins=[pin for pin in pins if pin.version in numbers],
        )

    async def SignReads(self, request: pb.SignReadsRequest, context: Context) -> pb.SignReadsResponse:
        run = await self.registry.get(request.run_id)
        return await self.grants.sign(run.run, request.reads)

    async def PinVersion(self, request: pb.PinVersionRequest, context: Context) -> pb.PinVersionResponse:
        run = await self.registry.get(request.run_id)
        run.require_policy(request.policy_id)
        pin = await self.versions.store.versions.pin(
            run.run_id, request.policy_id, version=request.version, reason=request.reason
        )
        await self.durability.barrier(run.run_id)
        return pb.PinVersionResponse(pin=pin)

    async def UnpinVersion(
        self, request: pb.UnpinVersionRequest, context: Context
    ) -> pb.UnpinVersionResponse:
        run = await self.registry.get(request.run_id)
        run.require_policy(request.policy_id)
        was_pinned = await self.versions.store.versions.unpin(
            run.run_id, request.policy_id, version=request.version
        )
        await self.durability.barrier(run.run_id)
        return pb.UnpinVersionResponse(was_pinned=was_pinned)
