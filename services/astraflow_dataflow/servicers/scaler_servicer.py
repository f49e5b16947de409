"""ExternalScaler: how large each pool of nodes should be, in the terms of KEDA.

Served on a listener of its own and asked by KEDA alone: whatever becomes of it, nodes and trainers never notice.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from astraflow.errors import AstraflowError, InvalidArgumentError, NotFoundError
from astraflow.keda.v1 import external_scaler_pb2 as pb
from astraflow.keda.v1 import external_scaler_pb2_grpc
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.status.pools import load_of, nodes_wanted
from astraflow_dataflow.status.reporting import Reporting
from astraflow_kit.log import get_logger
from astraflow_kit.serve import Context

log = get_logger(__name__)

METRIC = "nodes_wanted"
_INTERVAL_S = 5.0


@dataclass(frozen=True)
class ScalerServicer(external_scaler_pb2_grpc.ExternalScalerServicer):
    """Serves ExternalScaler."""

    registry: RunRegistry
    reporting: Reporting
    ending: asyncio.Event
    """Set when the server is about to stop: streams then end with OK, for KEDA backs off after an error."""
    interval_s: float = _INTERVAL_S

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=await self._wanted(request) > 0)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.IsActiveResponse]:
        said = await self._wanted(request) > 0
        yield pb.IsActiveResponse(result=said)
        while not await self._ends_within(self.interval_s):
            try:
                active = await self._wanted(request) > 0
            except AstraflowError as error:  # Redis is away, say: what was said last holds until it is back
                log.info("scaler.not_asked", pool=request.scalerMetadata.get("pool", ""), reason=error.reason)
                continue
            if active != said:
                said = active
                yield pb.IsActiveResponse(result=said)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        await self._wanted(request)  # wrong metadata is refused before anything is scaled by it
        return pb.GetMetricSpecResponse(
            metricSpecs=[pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)]
        )

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        wanted = await self._wanted(request.scaledObjectRef)
        value = pb.MetricValue(
            metricName=request.metricName or METRIC, metricValue=math.ceil(wanted), metricValueFloat=wanted
        )
        return pb.GetMetricsResponse(metricValues=[value])

    async def _wanted(self, request: pb.ScaledObjectRef) -> float:
        """How many nodes the pool could keep busy; none while its run does not exist, so that it shrinks."""
        asked = request.scalerMetadata
        given, share = _number(asked, "tasksPerNode", most=65_536), _number(asked, "share", most=1)
        try:
            context = await self.registry.get(asked.get("runId", ""))
            report = await self.reporting.pools(context)
        except NotFoundError as error:
            log.info("scaler.no_run", scaled_object=request.name, message=error.message)
            return 0.0
        pool = load_of(report, asked.get("pool", ""))
        measured = pool.capacity / pool.nodes if pool.nodes else 0.0
        tasks_per_node = given or measured or context.recipe.raas.max_concurrent_tasks
        return nodes_wanted(
            report, pool.pool, tasks_per_node=tasks_per_node, share=1.0 if share is None else share
        )

    async def _ends_within(self, wait_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.ending.wait()
        return self.ending.is_set()


def _number(metadata: Mapping[str, str], name: str, *, most: float) -> float | None:
    """A number of the trigger's metadata above 0, None where it is not given. Raises InvalidArgumentError."""
    text = metadata.get(name, "")
    if not text:
        return None
    with suppress(ValueError):
        if 0 < (number := float(text)) <= most:
            return number
    raise InvalidArgumentError(
        f"trigger metadata {name} = {text!r} must be a number above 0, at most {most:g}; correct the ScaledObject"
    )
