"""A dataflow server, a trainer and a node that answer the launcher by a test's script, over real gRPC.

They keep what they were asked; fields may be changed at any time. Their processes are played by a real child
that does nothing, so restarts and ends are real. Used by the tests of `observer` and `development_run`.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import admin_service_pb2_grpc as admin_grpc
from astraflow.dataflow.v1 import evaluation_service_pb2 as evaluation_rpcs
from astraflow.dataflow.v1 import evaluation_service_pb2_grpc as evaluations_grpc
from astraflow.dataflow.v1 import run_pb2, version_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import run_service_pb2_grpc as runs_grpc
from astraflow.dataflow.v1 import version_service_pb2 as version_rpcs
from astraflow.dataflow.v1 import version_service_pb2_grpc as versions_grpc
from astraflow.raas.v1 import node_service_pb2 as nodes
from astraflow.raas.v1.node_service_pb2_grpc import NodeServiceServicer
from astraflow.trainer.v1 import trainer_service_pb2 as trainers
from astraflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from astraflow_kit.lifecycle import Addresses, write_address_file
from astraflow_kit.server_info import server_info
from astraflow_launcher.run.processes import Child, ChildSpec, Supervisor
from support.scripted_dataflow import eventually, listen

POLICY = "solver"
Status = admin.StatusResponse


@dataclass
class ScriptedServer(  # type: ignore[misc]  # two services have a Watch; it answers neither
    admin_grpc.AdminServiceServicer,
    evaluations_grpc.EvaluationServiceServicer,
    runs_grpc.RunServiceServicer,
    versions_grpc.VersionServiceServicer,
):
    """The dataflow server of a run with one policy."""

    status: Status = field(default_factory=Status)
    versions: list[version_pb2.Version] = field(default_factory=list)
    failure: grpc.StatusCode | None = None
    before_listing: Callable[[], None] = lambda: None
    listings_meet: asyncio.Barrier | None = None
    """Where listings wait for each other before they are answered."""
    on_update: Callable[[], None] = lambda: None
    created: list[run_pb2.Run] = field(default_factory=list)
    identity: str = ""
    forgotten: bool = False
    """Whether it knows no run."""
    """Of its run."""
    finished_step: int = 0
    """Last step the trainer is said to have finished."""
    updates: list[run_pb2.RunState.ValueType] = field(default_factory=list)
    num_listings: int = 0
    nodes_leave_after: int = 0
    """How often a node that somebody started is still listed as connected."""

    def announce(self, *numbers: int) -> None:
        """Add versions, oldest first."""
        self.versions += [version_pb2.Version(policy_id=POLICY, version=number) for number in numbers]

    async def Status(self, request: Any, context: Any) -> Status:
        """The scripted status, with the newest version in it."""
        if self.failure is not None:
            await context.abort(self.failure, "scripted")
        answer = Status()
        answer.CopyFrom(self.status)
        newest = self.versions[-1] if self.versions else None
        answer.policies.add(policy_id=POLICY, version=newest, last_finished_step=self.finished_step)
        return answer

    async def GetServerInfo(self, request: Any, context: Any) -> admin.GetServerInfoResponse:
        """This release."""
        return admin.GetServerInfoResponse(server=server_info())

    async def ListNodes(self, request: Any, context: Any) -> admin.ListNodesResponse:
        """One node, until it has left."""
        self.nodes_leave_after = max(-1, self.nodes_leave_after - 1)
        return admin.ListNodesResponse(nodes=[admin.NodeStatus(connected=self.nodes_leave_after >= 0)])

    async def ListVersions(self, request: Any, context: Any) -> version_rpcs.ListVersionsResponse:
        """Versions, newest first, in pages of at most 1,000."""
        self.num_listings += 1
        self.before_listing()
        if self.listings_meet is not None:
            await self.listings_meet.wait()
        size = min(request.page_size or 50, 1000)
        end = int(request.page_token or len(self.versions))
        found = list(reversed(self.versions[max(0, end - size) : end]))
        token = str(end - size) if end > size else ""
        return version_rpcs.ListVersionsResponse(versions=found, next_page_token=token)

    async def GetEvaluation(self, request: Any, context: Any) -> evaluation_rpcs.GetEvaluationResponse:
        """The newest, with a task on each of two pages and its mean reward as its score."""
        newest = self.status.evaluations[-1]
        second = request.page_token == "1"
        return evaluation_rpcs.GetEvaluationResponse(
            evaluations=[newest],
            scores=[evaluation_rpcs.Score(policy_id=POLICY, avg_at_k=newest.mean_reward)],
            tasks=[evaluation_rpcs.TaskResult(index=int(second))],
            next_page_token="" if second else "1",
        )

    async def CreateRun(self, request: Any, context: Any) -> runs.CreateRunResponse:
        """Keep the run."""
        self.created.append(request.run)
        answer = runs.CreateRunResponse(run=request.run)
        answer.run.state, answer.run.identity = self.status.state, self.identity
        return answer

    async def GetRun(self, request: Any, context: Any) -> runs.GetRunResponse:
        """The run, as far as it is scripted."""
        if self.forgotten:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no run on this server")
        return runs.GetRunResponse(run=run_pb2.Run(run_id=request.run_id, identity=self.identity))

    async def UpdateRun(self, request: Any, context: Any) -> runs.UpdateRunResponse:
        """Keep the asked state; `on_update` decides what follows."""
        self.updates.append(request.state)
        self.on_update()
        return runs.UpdateRunResponse()


@dataclass
class ScriptedTrainer(TrainerServiceServicer):
    """A trainer that has finished `steps`; its stream ends once `ending` is set."""

    steps: list[int] = field(default_factory=list)
    ending: bool = False
    asked_after: list[int] = field(default_factory=list)

    async def Status(self, request: Any, context: Any) -> trainers.StatusResponse:
        """The last step."""
        return trainers.StatusResponse(step=self.steps[-1] if self.steps else 0)

    async def WatchMetrics(self, request: Any, context: Any) -> AsyncIterator[trainers.WatchMetricsResponse]:
        """Every step after the asked one, as it is added."""
        self.asked_after.append(request.after_step)
        after = request.after_step
        while True:
            for step in [step for step in self.steps if step > after]:
                after = step
                yield metrics_of(step)
            if self.ending:
                return
            await asyncio.sleep(0.005)


@dataclass
class ScriptedNode(NodeServiceServicer):
    """A node that has sampled some tokens."""

    tokens: int = 0

    async def Status(self, request: Any, context: Any) -> nodes.StatusResponse:
        """Its tokens."""
        return nodes.StatusResponse(tokens=self.tokens)


def metrics_of(step: int) -> trainers.WatchMetricsResponse:
    """What a trainer tells of a step."""
    message = trainers.WatchMetricsResponse(step=step, metrics={"reward_mean": step / 10})
    message.wait_duration.FromMilliseconds(250)
    message.train_duration.FromMilliseconds(1500)
    return message


@asynccontextmanager
async def serving(servicer: ScriptedServer | ScriptedTrainer | ScriptedNode) -> AsyncIterator[str]:
    """Serve on a free port of loopback; gives the address. Streams are cut at the end."""
    server, address = await listen(servicer)
    try:
        yield address
    finally:
        await server.stop(None)


@dataclass(frozen=True)
class IdleProcess:
    """A child process that does nothing but exist, for which a scripted daemon answers."""

    child: Child
    folder: Path

    @classmethod
    async def start(cls, supervisor: Supervisor, folder: Path, *, name: str) -> Self:
        """Start it under `supervisor` and wait until it runs."""
        loop = 'while [ ! -e "$0" ]; do sleep 0.02; done'
        spec = ChildSpec(
            name=name,
            argv=("sh", "-c", loop, str(folder / f"{name}.end")),
            log_path=folder / f"{name}.log",
            address_file=folder / f"{name}.json",
        )
        process = cls(await supervisor.start(spec), folder)
        await eventually(lambda: process.child.running, what=f"{name} runs")
        return process

    @property
    def pid(self) -> int:
        """The process that runs now."""
        assert self.child.process is not None
        return self.child.process.pid

    def publish(self, address: str) -> None:
        """Say that the daemon listens on `address`."""
        assert self.child.spec.address_file is not None
        write_address_file(self.child.spec.address_file, Addresses(pid=self.pid, grpc=address))

    async def restart(self) -> None:
        """SIGKILL it and wait until the supervisor has started it again."""
        before = self.pid
        os.kill(before, signal.SIGKILL)
        is_new = lambda: self.child.running and self.pid != before  # noqa: E731
        await eventually(is_new, what="the child was started again")

    async def end(self) -> None:
        """Let it exit with status 0."""
        (self.folder / f"{self.child.spec.name}.end").touch()
        await asyncio.wait_for(self.child.finished.wait(), 60)
