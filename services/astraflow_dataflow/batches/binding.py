"""Batching: the batch of a step, waited for, sealed and streamed.

A batch is bound by one atomic call and its manifest is a pure function of the bound groups, so a crash
between binding and sealing is repaired by the next reader with equal bytes. Called by the batch service.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import islice

from astraflow.dataflow.v1 import batch_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as pb
from astraflow.errors import InvalidArgumentError
from astraflow.plugins import StepRequest
from astraflow.trajectories import batch_digest
from astraflow_dataflow.batches.measuring import inform_filters, measured_step
from astraflow_dataflow.batches.needs import suited
from astraflow_dataflow.batches.replay import priorities
from astraflow_dataflow.batches.selecting import ready_group, selection
from astraflow_dataflow.records import Candidates, Selection
from astraflow_dataflow.rules.staleness import histogram
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.batches import BoundStep, stage_name
from astraflow_dataflow.store.payloads.packs import Place
from astraflow_dataflow.store.store import Store
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger

log = get_logger(__name__)

PAYLOADS_PER_READ = 32
# A waiting call looks again at least this often, should an event get lost with its Redis.
_LOOK_AGAIN_S = 5.0
_FINAL = ("run_finished", "not_ahead")
"""What a batch waits for when no waiting helps."""


@dataclass(frozen=True)
class Batching:
    """Hands batches to trainers."""

    store: Store
    registry: RunRegistry
    lease_s: float

    async def acquire(
        self, context: RunContext, request: pb.AcquireBatchRequest, *, wait_s: float
    ) -> pb.AcquireBatchResponse:
        """Return the step's batch, waiting up to `wait_s` for one.

        Raises FencedError, NotFoundError, InvalidArgumentError.
        """
        deadline_s = asyncio.get_running_loop().time() + wait_s
        topics = [f"ready {request.policy_id}", f"version {request.policy_id}", "run"]
        needs = context.recipe.policy(request.policy_id).batches.batch_needs
        if context.recipe.dataflow.barrier == "phase" or needs:
            # Comes with every settled group, also those that were dropped or are of other policies.
            topics.append("work")
        with context.wakeups.subscribe(*topics) as news:
            while True:
                left_s = deadline_s - asyncio.get_running_loop().time()
                await self.registry.refresh_plugins(context)
                reply = await self._try(context, request, wait_s=max(0.0, left_s))
                if reply is None:
                    continue
                if reply.HasField("batch"):
                    failpoints.hit("dataflow.bound")
                    reply.batch.CopyFrom(await self._manifest(context, request))
                    return reply
                if left_s <= 0 or reply.waiting_for in _FINAL:
                    return reply
                await news.wait(min(left_s, _LOOK_AGAIN_S))

    async def _try(
        self, context: RunContext, request: pb.AcquireBatchRequest, *, wait_s: float
    ) -> pb.AcquireBatchResponse | None:
        acquire = partial(
            self.store.batches.acquire,
            context.run_id,
            request,
            max_behind=context.recipe.policy(request.policy_id).trainer.publish.max_behind,
            lease_s=self.lease_s,
            wait_s=wait_s,
        )
        plugins, batches = context.plugins, context.recipe.policy(request.policy_id).batches
        selector, needs = plugins.selector, batches.batch_needs
        if selector is None and needs is None:
            return _without_offer(await acquire())
        reply = await acquire(selection=Selection(mode="offer"))
        if not isinstance(reply, Candidates):
            return reply
        asked = StepRequest(
            policy=request.policy_id,
            step=request.step,
            base_version=request.base_version,
            num_groups=batches.fresh_groups,
            max_staleness=batches.max_staleness,
            num_outstanding=reply.outstanding,
        )
        groups = [ready_group(*group) for group in reply.groups]
        wanted = obeyed = None
        if selector is not None:
            wanted = await selection(self.store, context, selector, groups=groups, request=asked)
            obeyed = None if selector.shadow else wanted
        if needs is not None:
            obeyed = suited(reply, groups, needs, num_groups=asked.num_groups, chosen=obeyed)
        bound = _without_offer(await acquire(selection=obeyed))
        if selector is not None and selector.shadow and wanted and bound and bound.HasField("batch"):
            nearest = {group.group_id for group in groups[: asked.num_groups]}
            differs = len(set(wanted.chosen) - nearest)
            if wanted.chosen:
                plugins.shadows.note("selector", selector.name, asked=asked.num_groups, differs=differs)
        return bound

    async def _manifest(self, context: RunContext, request: BoundStep) -> batch_pb2.Batch:
        """Return the bound batch of a step, sealing it first when nobody has. Raises FencedError, NotFoundError."""
        batch = await self.store.batches.batch(context.run_id, request)
        if batch.digest:
            return batch
        batch.digest = batch_digest(item.trajectory_id for item in batch.items)
        ages = histogram(
            (item.min_version for item in batch.items if not item.use), base_version=batch.base_version
        )
        await self.store.batches.seal(context.run_id, batch, staleness=ages)
        log.info(
            "batch.bound",
            policy_id=batch.policy_id,
            step=batch.step,
            batch_id=batch.batch_id,
            num_trajectories=len(batch.items),
        )
        return batch

    async def payloads(
        self, context: RunContext, request: pb.FetchBatchRequest
    ) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (trajectory id, body) in the order asked; all of the batch when nothing is.

        Raises InvalidArgumentError for a stranger.
        """
        batch = await self._manifest(context, request)
        members = [item.trajectory_id for item in batch.items]
        strangers = set(request.trajectory_ids) - set(members)
        if strangers:
            raise InvalidArgumentError(
                f"trajectories {sorted(strangers)[:5]} are not in batch {batch.batch_id}; ask for ids of its items"
            )
        chosen = list(request.trajectory_ids) or members
        places = await self.store.payloads.places(context.run_id, chosen)
        async with aclosing(self._bodies(context.run_id, places)) as bodies:
            for trajectory_id in chosen:
                yield trajectory_id, await anext(bodies)

    async def _bodies(self, run_id: str, places: Sequence[Place]) -> AsyncGenerator[bytes, None]:
        """Yield what is stored there; the next ones are read while the trainer is sent these."""
        starts = range(0, len(places), PAYLOADS_PER_READ)
        parts = (places[start : start + PAYLOADS_PER_READ] for start in starts)
        reads = (self._read(run_id, part) for part in parts)
        ahead = [asyncio.create_task(read) for read in islice(reads, 2)]
        try:
            while ahead:
                for body in await ahead[0]:
                    yield body
                del ahead[0]
                ahead += [asyncio.create_task(read) for read in islice(reads, 1)]
        finally:
            for read in ahead:
                read.cancel()

    async def _read(self, run_id: str, places: Sequence[Place]) -> list[bytes]:
        """Read some payloads. Raises NotFoundError, or UnavailableError for what was lost outside, naming the first."""
        bodies = await self.store.payloads.read(run_id, places)
        for place, body in zip(places, bodies, strict=True):
            if body is None:
                raise self.store.payloads.lost(run_id, place)
        return [body for body in bodies if body is not None]

    async def ack(self, context: RunContext, request: pb.AckBatchRequest) -> pb.BatchStage.ValueType:
        """Record a stage of the step, and let filters learn what its trainer measured. Raises FencedError,
        ConflictError, NotFoundError, InvalidArgumentError.
        """
        batch, batch_id = await self._manifest(context, request), request.batch_id
        measured = measured_step(batch, request.mismatch_kl)
        replay = context.recipe.policy(request.policy_id).batches.replay
        by_priority = replay is not None and replay.order == "priority"
        found = priorities(batch) if by_priority and request.stage == pb.BATCH_STAGE_TRAINED else {}
        recorded = await self.store.batches.ack(context.run_id, request, priorities=found)
        failpoints.hit("dataflow.acked")
        if recorded == pb.BATCH_STAGE_TRAINED:
            await inform_filters(self.store, context, measured)
        policy_id, stage = request.policy_id, stage_name(recorded)
        log.info("batch.acked", policy_id=policy_id, step=request.step, batch_id=batch_id, stage=stage)
        return recorded


def _without_offer(
    reply: pb.AcquireBatchResponse | Candidates | None,
) -> pb.AcquireBatchResponse | None:
    if isinstance(reply, Candidates):
        raise TypeError("an offer was not asked for")
    return reply
