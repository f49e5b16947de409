"""A node whose recipe takes long to make: it joins first, and says in a working session what it is still making.

Invariant: a node that has nothing to run yet asks for no task; what is made quickly costs no session of its own.
Called by `server` between finding the run and joining it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_service_pb2, task_service_pb2
from astraflow_kit.making import SHOWN_S, Making
from astraflow_kit.metrics import Metrics
from astraflow_raas.loops import LoopService
from astraflow_raas.work.held_leases import Runner
from astraflow_raas.work.worker import Worker, WorkerHooks

T = TypeVar("T")

MAKING = "plugin_start"
"""What such a node says that it waits for."""
_CLOSE_S = 1.0


async def made_in_session(
    making: Making[T],
    *,
    client: AsyncClient,
    request: run_service_pb2.JoinRunRequest,
    join: Callable[[], Awaitable[run_service_pb2.JoinRunResponse]],
    metrics: Metrics,
) -> tuple[T, run_service_pb2.JoinRunResponse | None]:
    """What was made, and the answer to joining where that was done meanwhile. Raises PluginError, and what `join`
    raises.
    """
    made = asyncio.ensure_future(making.made_beside())
    try:
        if (await asyncio.wait((made,), timeout=SHOWN_S))[0]:
            return made.result(), None
        joined = await join()
        worker = Worker(
            client,
            request,
            joined=joined,
            group_size=1,
            runner=cast("Runner", None),  # nothing is leased to whoever wants no task
            state=lambda: task_service_pb2.Credits(waiting_for=MAKING, waiting_detail=making.told),
            hooks=WorkerHooks(
                announce=lambda version: None,
                data_lost=lambda: None,
                durable=lambda position: None,
                drain_requested=lambda reason: None,  # the session after this one hears it again
            ),
            metrics=metrics,
        )
        telling = asyncio.ensure_future(worker.run())
        try:
            await asyncio.wait((made, telling), return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                telling.result()  # the server refuses the node
            return await made, joined
        finally:
            # Not by a drain, which is the end of a node.
            await LoopService.stop(worker, deadline_s=_CLOSE_S)
            await asyncio.gather(telling, return_exceptions=True)
    finally:
        made.cancel()
