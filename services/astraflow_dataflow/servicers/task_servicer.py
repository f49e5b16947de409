"""TaskService: submitting tasks, working sessions, and the unary lease calls."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import task_service_pb2 as pb
from astraflow.dataflow.v1 import task_service_pb2_grpc
from astraflow.errors import DeadlineError, InvalidArgumentError
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.rules.tasks import task_problem
from astraflow_dataflow.runs.current_sessions import CurrentSessions
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.tasks.leasing import Leasing
from astraflow_dataflow.tasks.sessions import WorkSession
from astraflow_dataflow.versions.announcements import Versions
from astraflow_kit.identity.speakers import speaking_node
from astraflow_kit.serve import Context

_LOOK_AGAIN_S = 5.0
_HELLO_WITHIN_S = 30.0


@dataclass(frozen=True)
class TaskServicer(task_service_pb2_grpc.TaskServiceServicer):
    """Serves TaskService."""

    store: Store
    registry: RunRegistry
    leasing: Leasing
    sessions: CurrentSessions
    versions: Versions
    durability: Durability
    node_silence_s: float

    async def SubmitTasks(self, request: pb.SubmitTasksRequest, context: Context) -> pb.SubmitTasksResponse:
        run = await self.registry.get(request.run_id)
        # Beside the event loop, which a thousand tasks with all the data they may have would hold up.
        tasks = await asyncio.to_thread(new_tasks, request, default_group_size=run.recipe.dataflow.group_size)
        submitted = await self.store.tasks.submit(run.run_id, tasks)
        await self.durability.barrier(run.run_id)
        return pb.SubmitTasksResponse(submitted=submitted, duplicates=len(tasks) - submitted)

    async def Work(
        self, requests: AsyncIterator[pb.WorkRequest], context: Context
    ) -> AsyncIterator[pb.WorkResponse]:
        try:
            async with asyncio.timeout(_HELLO_WITHIN_S):
                first = await anext(requests, None)
        except TimeoutError as error:
            raise DeadlineError(f"no `hello` within {_HELLO_WITHIN_S:g} s of opening the session") from error
        if first is None or first.WhichOneof("kind") != "hello":
            raise InvalidArgumentError("a working session opens with `hello`; send it first")
        run = await self.registry.get(first.hello.run_id)
        session = WorkSession(
            run,
            first.hello,
            node=speaking_node(),
            store=self.store,
            leasing=self.leasing,
            versions=self.versions,
            durability=self.durability,
            silence_s=self.node_silence_s,
        )
        async for response in session.responses(requests):
            yield response

    async def LeaseTasks(self, request: pb.LeaseTasksRequest, context: Context) -> pb.LeaseTasksResponse:
        run = await self.registry.get(request.run_id)
        wait_s = request.wait_duration.ToNanoseconds() / 1e9
        await self.store.nodes.report(
            speaking_node(),
            connected_ms=int(wait_s * 1000) + 5000,
            fields={"serving": json.dumps(dict(request.serving_versions))},
        )
        return await self._lease(run, request, wait_s=wait_s)

    async def _lease(
        self, run: RunContext, request: pb.LeaseTasksRequest, *, wait_s: float
    ) -> pb.LeaseTasksResponse:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        with run.wakeups.subscribe("work", "run") as news:
            while True:
                offer = await self.leasing.lease(
                    run,
                    node=speaking_node(),
                    want=request.max_tasks,
                    serving=dict(request.serving_versions),
                )
                left_s = deadline_s - loop.time()
                if offer.leases or left_s <= 0:
                    waiting_for = "" if offer.leases else offer.waiting_for
                    return pb.LeaseTasksResponse(leases=offer.leases, waiting_for=waiting_for)
                await news.wait(min(left_s, _LOOK_AGAIN_S))

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        run = await self.registry.get(request.run_id)
        # Whoever holds leases is at work, so its name is not free.
        connected_ms = int(run.recipe.dataflow.lease_ttl_s * 1000 / 2)
        await self.store.nodes.report(speaking_node(), connected_ms=connected_ms)
        lost = await self.leasing.renew(run, node=speaking_node(), lease_ids=request.lease_ids)
        return pb.RenewLeasesResponse(lost_lease_ids=lost)

    async def FailTask(self, request: pb.FailTaskRequest, context: Context) -> pb.FailTaskResponse:
        run = await self.registry.get(request.run_id)
        await self.sessions.require(speaking_node())
        requeued = await self.leasing.fail(run, request.failure, node=speaking_node())
        return pb.FailTaskResponse(requeued=requeued)


def new_tasks(request: pb.SubmitTasksRequest, *, default_group_size: int) -> Sequence[task_pb2.Task]:
    """Return submitted tasks with their group size. Raises InvalidArgumentError for the first that breaks a bound."""
    for task in request.tasks:
        problem = task_problem(task)
        if problem:
            raise InvalidArgumentError(problem)
        task.group_size = task.group_size or default_group_size
    return request.tasks
