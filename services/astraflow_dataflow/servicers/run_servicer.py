"""RunService: creating, joining and ending runs."""

from dataclasses import dataclass

from astraflow.dataflow.v1 import run_pb2, run_service_pb2_grpc
from astraflow.dataflow.v1 import run_service_pb2 as pb
from astraflow.errors import (
    AstraflowError,
    InvalidArgumentError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from astraflow.rollout.v1 import blob_pb2
from astraflow_dataflow.episodes.archiving import Archives
from astraflow_dataflow.records import Life
from astraflow_dataflow.rules.conservation import last_count
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.runs.unreadable import reading
from astraflow_dataflow.servicers.defaults import page_size
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.versions.announcements import Versions
from astraflow_dataflow.versions.grants import StoreGrants
from astraflow_kit import failpoints
from astraflow_kit.identity.gate import caller
from astraflow_kit.identity.sealing import Session, issue
from astraflow_kit.identity.speakers import speaker, wrong_session
from astraflow_kit.log import get_logger
from astraflow_kit.serve import Context

log = get_logger(__name__)

_MAX_NAMED = 8


@dataclass(frozen=True)
class RunServicer(run_service_pb2_grpc.RunServiceServicer):
    """Serves RunService."""

    store: Store
    registry: RunRegistry
    versions: Versions
    durability: Durability
    grants: StoreGrants
    archives: Archives
    trainer_lease_s: float
    """Time after its last call for which a trainer counts as at work."""

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:
        run = await self.registry.create(request.run)
        await self.durability.barrier(run.run_id, "")
        return pb.CreateRunResponse(run=run)

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Context) -> pb.UpdateRunResponse:
        run_id = await self.registry.resolve(request.run_id)
        if not request.state and not request.recipe_yaml:
            raise InvalidArgumentError(
                "nothing is to change; give `state`, or `recipe_yaml` with other plug-ins"
            )
        if request.recipe_yaml:
            await self.registry.switch(run_id, request.recipe_yaml, by=caller().subject)
        if request.state:
            wanted = Life.ACTIVE if request.state == run_pb2.RUN_STATE_ACTIVE else Life.FINISHING
            await self.store.runs.advance(run_id, wanted)
        await self.durability.barrier(run_id)
        return pb.UpdateRunResponse(run=await self.store.runs.get(run_id))

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        run_id = await self.registry.resolve(request.run_id)
        try:
            return pb.GetRunResponse(run=await self.store.runs.get(run_id))
        except NotFoundError as error:
            raise await self._no_such_run(run_id) from error

    async def _no_such_run(self, run_id: str) -> NotFoundError:
        """Names the runs that the caller may see. The metadata has `reason: run` where there are only others: runs are
        each tenant's own, so they have no names here.
        """
        ids = await self.store.runs.ids()
        if seen := [each for each in ids if caller().may_see(each)]:
            more = ", …" if len(seen) > _MAX_NAMED else ""
            return NotFoundError(
                f"no run {run_id!r} on this server, which has {', '.join(seen[:_MAX_NAMED])}{more}"
            )
        if ids:
            why = "and none of those it has is one that this token is for"
            return NotFoundError(f"no run {run_id!r} on this server, {why}", metadata={"reason": "run"})
        return NotFoundError(f"no run {run_id!r} on this server, which has none yet; create it")

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        size = page_size(request)
        offset = int(request.page_token or 0)
        ids = await self.store.runs.ids(offset=offset, limit=size + 1)
        seen = filter(caller().may_see, ids[:size])
        runs = [run for run_id in seen if (run := await self._listed(run_id))]
        return pb.ListRunsResponse(runs=runs, next_page_token=str(offset + size) if len(ids) > size else "")

    async def _listed(self, run_id: str) -> run_pb2.Run | None:
        """The run, or of one that cannot be read, or not now, its name; None of one whose creation was cut off."""
        try:
            with reading(run_id):
                return await self.store.runs.get(run_id)
        except NotFoundError:
            return None
        except (PreconditionError, UnavailableError) as error:
            log.warning("run.not_listed", run_id=run_id, message=error.message)
            return run_pb2.Run(run_id=run_id)

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.DeleteRunResponse:
        known = None
        try:  # before anybody sees that it is being deleted, and forgets it
            known = await self.registry.get(request.run_id)
        except AstraflowError as error:  # what cannot be read can still be deleted
            log.info("run.not_served", run_id=request.run_id, reason=error.reason, message=error.message)
        counters = await self.store.deletions.begin(
            request.run_id, force=request.force, lease_s=self.trainer_lease_s
        )
        failpoints.hit("dataflow.deleted")
        await self.registry.forget(request.run_id)
        if known is not None:
            await self.archives.delete(known)
        deleted = await self.store.deletions.delete_keys(request.run_id)
        await self.durability.barrier(request.run_id, "")
        log.info("run.deleted", run_id=request.run_id, keys=deleted, forced=request.force)
        return pb.DeleteRunResponse(trajectories=last_count(counters), deleted_keys=deleted)

    async def JoinRun(self, request: pb.JoinRunRequest, context: Context) -> pb.JoinRunResponse:
        run = await self.registry.get(request.run_id)
        session = await self.store.nodes.join(run.run_id, request, shown=_shown(request, run.run_id))
        joined = pb.JoinRunResponse(
            run=await self.store.runs.get(run.run_id),
            versions=[
                version
                for policy_id in run.policy_ids
                for version in await self.versions.for_nodes(run, policy_id, None)
            ],
            data_incarnation=await self.store.connection.data_incarnation(run.run_id),
            code_ref=blob_pb2.CodeRef(sha256=run.run.code.sha256),
            store_grants=self.grants.of(run.run),
            incarnation=session.number,
            session=issue(session, key=run.seal_key),
        )
        joined.lease_ttl_duration.FromMilliseconds(int(run.recipe.dataflow.lease_ttl_s * 1000))
        return joined


def _shown(request: pb.JoinRunRequest, run_id: str) -> Session | None:
    """The last session of the node that joins, where it showed its credential. Raises PermissionError_ for a process
    that was given another number, or shows nothing.
    """
    shown = speaker()
    own = shown if shown is not None and (shown.run_id, shown.name) == (run_id, request.node_id) else None
    if request.incarnation and (own is None or own.number != request.incarnation):
        shows = f"the credential of number {own.number}" if own else "no credential of it"
        raise wrong_session(
            f"node {request.node_id!r} joins as number {request.incarnation} and shows {shows}; send incarnation 0 and "
            "the newest credential that the node kept, or none: JoinRun returns its number"
        )
    return own
