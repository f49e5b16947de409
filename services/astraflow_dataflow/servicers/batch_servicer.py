"""BatchService: claiming a policy and taking its batches."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from astraflow.dataflow.v1 import batch_service_pb2 as pb
from astraflow.dataflow.v1 import batch_service_pb2_grpc
from astraflow_dataflow.batches.binding import Batching
from astraflow_dataflow.records import Life
from astraflow_dataflow.rules.failures import why_stopped_by_steps
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.batches import stage_name
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.store import Store
from astraflow_kit.identity.gate import caller
from astraflow_kit.identity.sealing import TRAINER, Session, issue, new_lineage
from astraflow_kit.identity.speakers import speaker, wrong_session
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.serve import Context

log = get_logger(__name__)


@dataclass(frozen=True)
class BatchServicer(batch_service_pb2_grpc.BatchServiceServicer):
    """Serves BatchService."""

    store: Store
    registry: RunRegistry
    batching: Batching
    metrics: Metrics
    durability: Durability

    async def ClaimPolicy(self, request: pb.ClaimPolicyRequest, context: Context) -> pb.ClaimPolicyResponse:
        run = await self._run(request.run_id, request.policy_id)
        if request.held_epoch:
            _require_held(request, run_id=run.run_id)
        claimer = _claimer(request.trainer_id)
        claim = await self.store.batches.claim(
            run.run_id,
            request,
            claimer=claimer,
            lease_s=self.batching.lease_s,
            incarnation=await self.store.connection.data_incarnation(run.run_id),
        )
        await self.durability.barrier(run.run_id)
        log.info(
            "policy.claimed",
            policy_id=request.policy_id,
            trainer_epoch=claim.trainer_epoch,
            trainer=claimer,
        )
        claim.batch_lease_duration.FromMilliseconds(int(self.batching.lease_s * 1000))
        claim.data_incarnation = await self.store.connection.data_incarnation(run.run_id)
        claimed = Session(
            speaker=TRAINER,
            run_id=run.run_id,
            name=request.policy_id,
            number=claim.trainer_epoch,
            lineage=new_lineage(),
        )
        claim.session = issue(claimed, key=await self.registry.seal_key(run.run_id))
        return claim

    async def HoldPolicy(self, request: pb.HoldPolicyRequest, context: Context) -> pb.HoldPolicyResponse:
        run = await self._run(request.run_id, request.policy_id)
        await self.store.batches.hold(run.run_id, request, lease_s=self.batching.lease_s)
        return pb.HoldPolicyResponse()

    async def ReleasePolicy(
        self, request: pb.ReleasePolicyRequest, context: Context
    ) -> pb.ReleasePolicyResponse:
        run = await self._run(request.run_id, request.policy_id)
        await self.store.batches.release_policy(
            run.run_id, request.policy_id, epoch=request.trainer_epoch, doubt=request.doubt
        )
        log.info(
            "policy.released",
            policy_id=request.policy_id,
            trainer_epoch=request.trainer_epoch,
            doubt=request.doubt,
        )
        return pb.ReleasePolicyResponse()

    async def AcquireBatch(
        self, request: pb.AcquireBatchRequest, context: Context
    ) -> pb.AcquireBatchResponse:
        run = await self._run(request.run_id, request.policy_id)
        reply = await self.batching.acquire(run, request, wait_s=request.wait_duration.ToNanoseconds() / 1e9)
        if reply.HasField("batch"):
            await self.durability.barrier(run.run_id)
        return reply

    async def FetchBatch(
        self, request: pb.FetchBatchRequest, context: Context
    ) -> AsyncIterator[pb.FetchBatchResponse]:
        run = await self._run(request.run_id, request.policy_id)
        pack, size_bytes = pb.FetchBatchResponse(), 0
        async for trajectory_id, body in self.batching.payloads(run, request):
            if not request.pack_bytes:
                yield pb.FetchBatchResponse(trajectory_id=trajectory_id, body=body)
                continue
            pack.trajectories.add(trajectory_id=trajectory_id, body=body)
            size_bytes += len(body)
            if size_bytes >= request.pack_bytes:
                yield pack
                pack, size_bytes = pb.FetchBatchResponse(), 0
        if pack.trajectories:
            yield pack

    async def AckBatch(self, request: pb.AckBatchRequest, context: Context) -> pb.AckBatchResponse:
        run = await self._run(request.run_id, request.policy_id)
        recorded = await self.batching.ack(run, request)
        await self.durability.barrier(run.run_id)
        self.metrics.increment(
            "astraflow_dataflow_steps_total", policy=request.policy_id, stage=stage_name(recorded)
        )
        return pb.AckBatchResponse(stage=recorded)

    async def NackBatch(self, request: pb.NackBatchRequest, context: Context) -> pb.NackBatchResponse:
        run = await self._run(request.run_id, request.policy_id)
        reply, failed = await self.store.batches.nack(run.run_id, request)
        if request.quarantine:
            await self._stop_failing(run, request, failed=failed)
        await self.durability.barrier(run.run_id)
        said = {"policy_id": request.policy_id, "step": request.step, "reason": request.reason}
        if request.quarantine:
            num_dropped = reply.quarantined_trajectories
            log.warning("batch.quarantined", batch_id=request.batch_id, dropped=num_dropped, **said)
        else:
            log.info("batch.given_back", groups=reply.returned_groups, **said)
        return reply

    async def _stop_failing(self, run: RunContext, request: pb.NackBatchRequest, *, failed: int) -> None:
        """End the run when too many steps fail, whatever is trained on."""
        most = run.recipe.resolved_policies[request.policy_id].batches.max_failed_batches
        reason = why_stopped_by_steps(request.policy_id, failed, request.detail, max_failed=most)
        if reason:
            log.error("run.stopped", run_id=run.run_id, reason=reason)
            await self.store.runs.advance(run.run_id, Life.FINISHING, stopped_for=reason)

    async def VoidBatch(self, request: pb.VoidBatchRequest, context: Context) -> pb.VoidBatchResponse:
        run = await self._run(request.run_id, request.policy_id)
        returned, dropped = await self.store.batches.void(
            run.run_id,
            request.policy_id,
            step=request.step,
            batch_id=request.batch_id,
            discard=request.action == pb.VOID_ACTION_DISCARD,
            reason=request.reason or "voided by an operator",
        )
        await self.durability.barrier(run.run_id)
        log.warning("batch.voided", batch_id=request.batch_id, step=request.step, dropped=dropped)
        return pb.VoidBatchResponse(returned_groups=returned, dropped_trajectories=dropped)

    async def RenewBatch(self, request: pb.RenewBatchRequest, context: Context) -> pb.RenewBatchResponse:
        run = await self._run(request.run_id, request.policy_id)
        await self.store.batches.renew(run.run_id, request, lease_s=self.batching.lease_s)
        return pb.RenewBatchResponse()

    async def MarkDurable(self, request: pb.MarkDurableRequest, context: Context) -> pb.MarkDurableResponse:
        run = await self._run(request.run_id, request.policy_id)
        await self.store.batches.mark_durable(run.run_id, request)
        # Before anything is freed: the note that it may be must not be lost.
        await self.durability.barrier(run.run_id)
        released = await self.store.batches.release_durable(run.run_id, request.policy_id)
        return pb.MarkDurableResponse(released_trajectories=released)

    async def _run(self, run_id: str, policy_id: str) -> RunContext:
        run = await self.registry.get(run_id)
        run.require_policy(policy_id)
        return run


def _claimer(trainer_id: str) -> str:
    """How others hear of a trainer: by the subject of its token first, for it calls itself as it likes."""
    identity = caller()
    return f"{identity.subject} ({trainer_id})" if identity.token_id else trainer_id


def _require_held(request: pb.ClaimPolicyRequest, *, run_id: str) -> None:
    """Raise PermissionError_ where another trainer than that which held the policy claims it again."""
    held = speaker()
    named = (run_id, request.policy_id, request.held_epoch)
    if held is None or held.speaker != TRAINER or (held.run_id, held.name, held.number) != named:
        raise wrong_session(
            f"held_epoch {request.held_epoch} of {request.policy_id} is claimed again with the credential of that "
            "epoch; send it as `astraflow-session`, or claim without held_epoch"
        )
