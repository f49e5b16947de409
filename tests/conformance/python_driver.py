"""Runs the conformance suite's operations with the Python client: one JSON object per line in, one per line out.

The operations are in docs/clients.md; what is right is decided by whoever sends them. Streams that come back after a
loss are those of the RaaS node.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from astraflow import errors
from astraflow.client import AsyncClient, Connection, RetryPolicy, correlated
from astraflow.columns import Columns, decode_columns, encode_columns
from astraflow.dataflow.v1 import run_service_pb2, task_service_pb2, version_pb2
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.work.session import Failure
from astraflow_raas.work.worker import Worker, WorkerHooks

Operation = Mapping[str, Any]
ATTRIBUTES = {
    "AdminService": "admin",
    "BatchService": "batches",
    "EvaluationService": "evaluations",
    "RunService": "runs",
    "SampleService": "samples",
    "TaskService": "tasks",
    "TrajectoryService": "trajectories",
    "VersionService": "versions",
}
BRANCHES = {
    "retryable": errors.RetryableError,
    "request": errors.RequestError,
    "state": errors.StateError,
}


@dataclass
class OpenPushes:
    """A push stream and the task that runs it."""

    pusher: Pusher
    running: "asyncio.Task[None]"


@dataclass
class OpenSession:
    """A working session: what it saw, and the leases that wait for the suite's word. It runs the leases itself."""

    events: "asyncio.Queue[dict[str, Any]]" = field(default_factory=asyncio.Queue)
    leases: "dict[str, asyncio.Future[Failure | None]]" = field(default_factory=dict)
    worker: Worker | None = None
    running: "asyncio.Task[None] | None" = None

    async def run(self, lease: task_pb2.Lease, *, member_ended: Callable[[], None]) -> Failure | None:
        """A `Runner`: the lease ends as the suite says."""
        del member_ended
        self.events.put_nowait({"lease": as_json(lease)})
        verdict = self.leases[lease.lease_id] = asyncio.get_running_loop().create_future()
        try:
            return await verdict
        except asyncio.CancelledError:
            self.events.put_nowait({"cancelled": lease.lease_id})
            raise

    def announced(self, version: version_pb2.Version) -> None:
        """A version came."""
        self.events.put_nowait({"version": {"policy_id": version.policy_id, "version": version.version}})

    async def serve(self, worker: Worker) -> None:
        """Hold the session until it ends."""
        try:
            await worker.run()
        except errors.AstraflowError as error:
            self.events.put_nowait({"error": described(error)})


class Driver:
    """What is open, and the operations on it."""

    def __init__(self) -> None:
        self.clients: dict[str, AsyncClient] = {}
        self.streams: dict[str, AsyncGenerator[Message]] = {}
        self.pushes: dict[str, OpenPushes] = {}
        self.sessions: dict[str, OpenSession] = {}

    async def connect(self, operation: Operation) -> None:
        """Open a client."""
        total_s = operation.get("retry_total_s")
        retry = None if total_s is None else RetryPolicy(total_s=total_s)
        connection = Connection.of(operation["address"])
        if "token" in operation:
            connection = replace(connection, token=operation["token"])
        client = AsyncClient(connection, retry=retry)
        self.clients[operation.get("client", "main")] = client

    def client(self, operation: Operation) -> AsyncClient:
        """The client an operation names; with `as`, as the holder of that credential."""
        client = self.clients[operation.get("client", "main")]
        if "as" in operation:
            client = copy(client)
            client.session = operation["as"]
        return client

    async def server_info(self, operation: Operation) -> object:
        """Ask who the server is."""
        info = await self.client(operation).server_info()
        return {"contract_version": info.contract_version, "product_version": info.product_version}

    async def call(self, operation: Operation) -> object:
        """Call a unary rpc."""
        rpc, request = self._rpc(operation)
        timeout = {"timeout_s": operation["timeout_s"]} if "timeout_s" in operation else {}
        correlation_id = operation.get("correlation_id")
        with nullcontext() if correlation_id is None else correlated(correlation_id):
            return as_json(await self.client(operation).call(rpc, request, **timeout))

    async def stream_open(self, operation: Operation) -> None:
        """Open a server stream."""
        rpc, request = self._rpc(operation)
        self.streams[operation.get("stream", "main")] = self.client(operation).stream(rpc, request)

    async def stream_next(self, operation: Operation) -> object:
        """The next response of a server stream."""
        answer = await anext(self.streams[operation.get("stream", "main")], None)
        return {"ended": True} if answer is None else as_json(answer)

    async def stream_close(self, operation: Operation) -> None:
        """Leave a server stream."""
        await self.streams.pop(operation.get("stream", "main")).aclose()

    def _rpc(self, operation: Operation) -> tuple[Any, Message]:
        service, name = operation["rpc"].split("/")
        method = Default().FindServiceByName(f"astraflow.dataflow.v1.{service}").methods_by_name[name]
        request = ParseDict(operation.get("request", {}), GetMessageClass(method.input_type)())
        return getattr(getattr(self.client(operation), ATTRIBUTES[service]), name), request

    async def encode_columns(self, operation: Operation) -> object:
        """Columns to a message."""
        columns = Columns(
            token_ids=np.asarray(operation["token_ids"], dtype=np.int32),
            loss_mask=np.asarray(operation["loss_mask"], dtype=bool),
            logprobs=np.asarray(operation["logprobs"], dtype=np.float32),
            version_spans=tuple(map(tuple, operation["version_spans"])),
        )
        return as_json(encode_columns(columns, trajectory_id=operation["trajectory_id"]))

    async def decode_columns(self, operation: Operation) -> object:
        """A message to columns."""
        columns = decode_columns(ParseDict(operation["message"], trajectory_pb2.Trajectory()))
        arrays = {name: getattr(columns, name).tolist() for name in ("token_ids", "loss_mask", "logprobs")}
        return {**arrays, "version_spans": [list(span) for span in columns.version_spans]}

    async def push_open(self, operation: Operation) -> None:
        """Open a push stream."""
        pusher = Pusher(self.client(operation), metrics=Metrics())
        running = asyncio.create_task(pusher.run())
        self.pushes[operation.get("stream", "main")] = OpenPushes(pusher, running)

    async def push(self, operation: Operation) -> object:
        """Push episodes side by side."""
        opened = self.pushes[operation.get("stream", "main")]
        episodes = [ParseDict(episode, trajectory_pb2.Episode()) for episode in operation["episodes"]]
        results = asyncio.gather(*map(opened.pusher.push, episodes))
        # A stream that the server refuses ends with its error, and nobody answers any more.
        await asyncio.wait((results, opened.running), return_when=asyncio.FIRST_COMPLETED)
        if opened.running.done():
            results.cancel()
            await opened.running
        return [as_json(result) for result in await results]

    async def push_close(self, operation: Operation) -> object:
        """Push what is left and close the stream."""
        opened = self.pushes.pop(operation.get("stream", "main"))
        all_answered = await opened.pusher.flush(deadline_s=10)
        await opened.pusher.stop(deadline_s=1)
        return {"all_answered": all_answered}

    async def session_open(self, operation: Operation) -> None:
        """Join a run and start working."""
        names = ("run_id", "node_id", "max_concurrent_tasks")
        me = run_service_pb2.JoinRunRequest(**{name: operation[name] for name in names})
        client, session = self.client(operation), OpenSession()
        joined = await client.call(client.runs.JoinRun, me)
        client.session, me.incarnation = joined.session, joined.incarnation
        serving = operation.get("serving_versions", {})
        session.worker = Worker(
            client, me, joined=joined, group_size=1, runner=session, metrics=Metrics(),
            state=lambda: task_service_pb2.Credits(serving_versions=serving),
            hooks=WorkerHooks(
                announce=session.announced,
                data_lost=lambda: None,
                durable=lambda _position: None,
                drain_requested=lambda reason: session.events.put_nowait({"ended": reason}),
            ),
        )  # fmt: skip
        session.running = asyncio.create_task(session.serve(session.worker))
        self.sessions[operation.get("session", "main")] = session

    def session(self, operation: Operation) -> OpenSession:
        """The session an operation names."""
        return self.sessions[operation.get("session", "main")]

    async def session_next(self, operation: Operation) -> object:
        """The next thing that the session saw."""
        return await self.session(operation).events.get()

    async def session_finish(self, operation: Operation) -> None:
        """The work on a lease is done."""
        self.session(operation).leases[operation["lease_id"]].set_result(None)

    async def session_fail(self, operation: Operation) -> None:
        """The work on a lease failed."""
        detail, retryable = operation.get("detail", ""), operation.get("retryable", True)
        failure = Failure(reason=operation["reason"], detail=detail, retryable=retryable)
        self.session(operation).leases[operation["lease_id"]].set_result(failure)

    async def session_close(self, operation: Operation) -> None:
        """Give back what is held and leave."""
        session = self.session(operation)
        if session.worker is not None and session.running is not None:
            await session.worker.stop(deadline_s=0.1)
            session.running.cancel()
            await asyncio.wait((session.running,))

    async def reset(self, _operation: Operation) -> None:
        """Close everything."""
        for name in self.sessions:
            await self.session_close({"session": name})
        for opened in self.pushes.values():
            await opened.pusher.stop(deadline_s=0)
            opened.running.cancel()
        for stream in self.streams.values():
            await stream.aclose()
        for client in self.clients.values():
            await client.close()
        self.__init__()  # type: ignore[misc]  # as it began


def as_json(message: Message) -> dict[str, Any]:
    """Proto3 JSON."""
    return MessageToDict(message)


def described(error: errors.AstraflowError) -> dict[str, Any]:
    """What a caller can tell of an error."""
    branch = next((name for name, kind in BRANCHES.items() if isinstance(error, kind)), "other")
    named = {"reason": error.reason, "code": error.code, "branch": branch, "message": error.message}
    return {**named, "metadata": error.metadata, "retry_after_s": error.retry_after_s}


async def answer(driver: Driver, operation: Operation) -> dict[str, Any]:
    """Do one operation."""
    run: Callable[[Operation], Awaitable[object]] | None
    run = getattr(driver, operation["op"].replace(".", "_"), None)
    if run is None:
        return {"unsupported": operation["op"]}
    try:
        result = await run(operation)
    except errors.AstraflowError as error:
        return {"error": described(error)}
    except Exception:  # noqa: BLE001 - the suite says which operation failed, with this as the reason
        return {"crashed": traceback.format_exc()}
    return {"answer": {} if result is None else result}


async def main() -> None:
    """Answer operations side by side until the input ends."""
    driver, running = Driver(), set[asyncio.Task[None]]()
    replies, sys.stdout = sys.stdout, sys.stderr  # logs of the node's streams go elsewhere

    async def reply(operation: Operation) -> None:
        replies.write(json.dumps({"id": operation["id"], **await answer(driver, operation)}) + "\n")
        replies.flush()

    while line := await asyncio.to_thread(sys.stdin.readline):
        task = asyncio.create_task(reply(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await driver.reset({})


if __name__ == "__main__":
    asyncio.run(main())
