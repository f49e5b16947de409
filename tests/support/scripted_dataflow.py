"""A dataflow server that follows a test's script, over real gRPC on loopback: what nodes are tested against.

It keeps every message a node sent, answers as told, sends what the test hands it, and can lose its streams or
restart on the same port. Waiting helpers end with an assertion instead of hanging.
"""

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_status import rpc_status

from astraflow._status import to_status
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import admin_service_pb2_grpc as admin_grpc
from astraflow.dataflow.v1 import durability_pb2, run_pb2, version_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import run_service_pb2_grpc as runs_grpc
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import task_service_pb2_grpc as tasks_grpc
from astraflow.dataflow.v1 import trajectory_service_pb2 as trajectories
from astraflow.dataflow.v1 import trajectory_service_pb2_grpc as trajectories_grpc
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow.server.v1 import server_info_pb2
from astraflow_kit.server_info import server_info

PATIENCE_S = 15.0
RUN_ID = "run-1"
POLICY = "solver"
RECIPE = """
run: {name: run-1, dataset: "recipe:Problems", steps: 3}
policies:
  solver:
    model: {path: somewhere}
    sampling: {max_new_tokens: 8}
dataflow: {group_size: 4, groups_per_step: 2}
raas:
  reward: "astraflow_raas.rewards.boxed_match:BoxedMatch"
  max_concurrent_tasks: 2
  episode_timeout_s: 20
"""

_LOST = grpc.StatusCode.UNAVAILABLE, "stream lost, as the test asked"
Context = grpc.aio.ServicerContext[Any, Any]
Respond = tasks.WorkResponse
Judge = Callable[[trajectory_pb2.Episode], trajectories.PushResult]


def accepted(_episode: trajectory_pb2.Episode) -> trajectories.PushResult:
    """The answer to good work."""
    return result(trajectories.OUTCOME_ACCEPTED)


def result(outcome: trajectories.Outcome.ValueType, *, reason: str = "") -> trajectories.PushResult:
    """An answer kept in memory."""
    in_memory = durability_pb2.DURABILITY_MEMORY
    return trajectories.PushResult(outcome=outcome, reason=reason, durability=in_memory)


def a_run(**fields: Any) -> run_pb2.Run:
    """The run that a scripted server has; `fields` are those in which it differs."""
    given = {"run_id": RUN_ID, "recipe_yaml": RECIPE, "store_uri": "file:///nowhere"} | fields
    return run_pb2.Run(**given)


def lease(
    task_id: str = "task-1",
    *,
    members: Sequence[int] = (0, 1, 2, 3),
    attempt: int = 1,
    required_versions: dict[str, int] | None = None,
    data_json: bytes = b'{"answer": "7"}',
    ttl_s: float = 20.0,
    hedge: bool = False,
) -> task_pb2.Lease:
    """A lease of one task; an evaluation when it requires versions."""
    purpose = task_pb2.PURPOSE_EVALUATION if required_versions else task_pb2.PURPOSE_TRAINING
    task = task_pb2.Task(
        task_id=task_id,
        messages=[task_pb2.Message(role="user", content="3 + 4?")],
        data_json=data_json,
        purpose=purpose,
        group_size=len(members),
    )
    return task_pb2.Lease(
        lease_id=f"{task_id}#{attempt}",
        run_id=RUN_ID,
        task=task,
        attempt=attempt,
        members=members,
        ttl_duration=duration(ttl_s),
        required_versions=required_versions or {},
        seed=11,
        hedge=hedge,
    )


def duration(seconds: float) -> Duration:
    """A protobuf duration."""
    made = Duration()
    made.FromMilliseconds(int(seconds * 1000))
    return made


async def eventually(holds: Callable[[], object], *, what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until `holds` is true; fails naming `what` was waited for."""
    try:
        async with asyncio.timeout(patience_s):
            while not holds():  # noqa: ASYNC110 - the condition lives in another task's plain data
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {patience_s} s: {what}") from None


async def refuse(context: Context, error: AstraflowError) -> None:
    """Answer with an error as a real server does."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


@dataclass
class ScriptedDataflow(
    admin_grpc.AdminServiceServicer,
    runs_grpc.RunServiceServicer,
    tasks_grpc.TaskServiceServicer,
    trajectories_grpc.TrajectoryServiceServicer,
):
    """The script and the record. Fields may be changed at any time."""

    info: server_info_pb2.ServerInfo = field(default_factory=server_info)
    run: run_pb2.Run = field(default_factory=a_run)
    versions: list[version_pb2.Version] = field(default_factory=list)
    data_incarnation: str = "data-1"
    lease_ttl_s: float = 20.0
    judge: Judge = accepted
    ack: asyncio.Event | None = None
    """While set to an unset event, pushes are received and not acknowledged."""
    run_fault: AstraflowError | None = None
    join_error: AstraflowError | None = None
    join_fault: grpc.StatusCode | None = None
    push_fault: grpc.StatusCode | None = None
    beat_s: float = 1.0
    """Between signs of life in a session; `math.inf` for a server that stands still."""

    joins: list[runs.JoinRunRequest] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    """The credential with which each joined."""
    starts: int = 0
    """Processes of nodes that joined."""
    hellos: list[tasks.Hello] = field(default_factory=list)
    credits: list[tasks.Credits] = field(default_factory=list)
    renewals: list[list[str]] = field(default_factory=list)
    receipts: list[str] = field(default_factory=list)
    failures: list[tasks.LeaseFailure] = field(default_factory=list)
    pushes: list[trajectory_pb2.Episode] = field(default_factory=list)
    packs: list[int] = field(default_factory=list)
    """Episodes of each push message."""
    acknowledged: list[int] = field(default_factory=list)
    """Push messages that each response acknowledges."""
    results_left_out: int = 0
    """Of the next response."""
    pushes_ahead: int = 0
    """That the next response acknowledges and nobody sent."""
    push_streams: int = 0
    max_unacked: int = 0
    _unacked: int = 0

    _sessions: list["asyncio.Queue[Respond | None]"] = field(default_factory=list)
    _broken: asyncio.Event = field(default_factory=asyncio.Event)

    # ------------------------------------------------------------------ what the test says

    def send(self, **kind: Any) -> None:
        """Send a message (`lease=`, `cancel=`, `version=`, `drain=`) on the newest working session."""
        self._sessions[-1].put_nowait(Respond(**kind))

    def break_streams(self) -> None:
        """End every open stream with UNAVAILABLE."""
        self._broken.set()
        self._broken = asyncio.Event()

    def failure_of(self, lease_id: str) -> tasks.LeaseFailure | None:
        """The failure reported for a lease."""
        return next((failure for failure in self.failures if failure.lease_id == lease_id), None)

    # ------------------------------------------------------------------ the contract

    async def GetServerInfo(
        self, request: admin.GetServerInfoRequest, context: Context
    ) -> admin.GetServerInfoResponse:
        return admin.GetServerInfoResponse(server=self.info)

    async def GetRun(self, request: runs.GetRunRequest, context: Context) -> runs.GetRunResponse:
        if self.run_fault is not None:
            await refuse(context, self.run_fault)
        return runs.GetRunResponse(run=self.run)

    async def JoinRun(self, request: runs.JoinRunRequest, context: Context) -> runs.JoinRunResponse:
        if self.join_error is not None:
            await refuse(context, self.join_error)
        if self.join_fault is not None:
            await context.abort(self.join_fault, "as the test asked")
        self.joins.append(request)
        metadata = dict(context.invocation_metadata() or ())
        self.shown.append(str(metadata.get("astraflow-session", "")))
        self.starts += not request.incarnation
        return runs.JoinRunResponse(
            incarnation=request.incarnation or self.starts,
            session=f"session-{request.incarnation or self.starts}",
            run=self.run,
            versions=self.versions,
            lease_ttl_duration=duration(self.lease_ttl_s),
            data_incarnation=self.data_incarnation,
        )

    async def Work(
        self, request_iterator: AsyncIterator[tasks.WorkRequest], context: Context
    ) -> AsyncIterator[Respond]:
        outbox: asyncio.Queue[Respond | None] = asyncio.Queue()
        self._sessions.append(outbox)
        reading = asyncio.create_task(self._record(request_iterator))
        broken = asyncio.create_task(self._broken.wait())
        try:
            sending = asyncio.create_task(outbox.get())
            while True:
                ended = (sending, broken, reading)
                timeout = None if math.isinf(self.beat_s) else self.beat_s
                done, _ = await asyncio.wait(ended, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield Respond(beat=tasks.Beat(number=1))
                    continue
                if broken.done():
                    await context.abort(*_LOST)
                if not sending.done():
                    return
                response = sending.result()
                sending = asyncio.create_task(outbox.get())
                if response is not None:
                    yield response
        finally:
            sending.cancel()
            reading.cancel()
            broken.cancel()

    async def FailTask(self, request: tasks.FailTaskRequest, context: Context) -> tasks.FailTaskResponse:
        self.failures.append(request.failure)
        return tasks.FailTaskResponse(requeued=request.failure.retryable)

    async def Push(
        self, request_iterator: AsyncIterator[trajectories.PushRequest], context: Context
    ) -> AsyncIterator[trajectories.PushResponse]:
        self.push_streams += 1
        self._unacked = 0
        if self.push_fault is not None:
            await context.abort(self.push_fault, "as the test asked")
        received: asyncio.Queue[trajectories.PushRequest] = asyncio.Queue()
        reading = asyncio.create_task(self._receive(request_iterator, received))
        broken = asyncio.create_task(self._broken.wait())
        try:
            while True:
                taking = asyncio.create_task(received.get())
                await asyncio.wait((taking, broken), return_when=asyncio.FIRST_COMPLETED)
                if taking.done() and self.ack is not None:
                    acking = asyncio.create_task(self.ack.wait())
                    await asyncio.wait((acking, broken), return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    taking.cancel()
                    await context.abort(*_LOST)
                requests = [taking.result()]
                while not received.empty():
                    requests.append(received.get_nowait())
                self.acknowledged.append(len(requests))
                episodes = [episode for request in requests for episode in request.episodes]
                self._unacked -= len(episodes)
                results = [self.judge(episode) for episode in episodes]
                del results[: self.results_left_out]
                sequence = requests[-1].sequence + self.pushes_ahead
                self.results_left_out = self.pushes_ahead = 0
                yield trajectories.PushResponse(sequence=sequence, results=results)
        finally:
            reading.cancel()
            broken.cancel()

    async def _receive(
        self,
        requests: AsyncIterator[trajectories.PushRequest],
        received: "asyncio.Queue[trajectories.PushRequest]",
    ) -> None:
        async for request in requests:
            self.pushes += request.episodes
            self.packs.append(len(request.episodes))
            self._unacked += len(request.episodes)
            self.max_unacked = max(self.max_unacked, self._unacked)
            received.put_nowait(request)

    async def _record(self, requests: AsyncIterator[tasks.WorkRequest]) -> None:
        kept: dict[str, list[Any]]
        kept = {"hello": self.hellos, "credits": self.credits, "failure": self.failures}
        async for request in requests:
            kind = str(request.WhichOneof("kind"))
            said = getattr(request, kind)
            if kind == "renewal":
                self.renewals.append(list(said.lease_ids))
            elif kind == "receipt":
                self.receipts += said.lease_ids
            else:
                kept[kind].append(said)


@dataclass
class RunningServer:
    """A scripted server that listens. `address` stays the same over `restart`."""

    script: ScriptedDataflow
    address: str
    server: grpc.aio.Server

    async def stop(self) -> None:
        """Stop listening; open streams end."""
        await self.server.stop(None)

    async def restart(self) -> None:
        """Listen again on the same port."""
        self.server, self.address = await listen(self.script, self.address)


@asynccontextmanager
async def running(script: ScriptedDataflow) -> AsyncIterator[RunningServer]:
    """Serve `script` on a free loopback port."""
    server, address = await listen(script)
    running_server = RunningServer(script, address, server)
    try:
        yield running_server
    finally:
        await running_server.stop()


async def listen(servicer: object, address: str = "127.0.0.1:0") -> tuple[grpc.aio.Server, str]:
    """Start a server of all services that a servicer derives from."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    register(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"


def register(servicer: object, server: grpc.Server | grpc.aio.Server) -> None:
    """Add all services that a servicer derives from."""
    for base in type(servicer).__mro__:
        add = getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server", None)
        if add is not None:
            add(servicer, server)
