"""The node's working session with the dataflow server: join, hold the `Work` stream, take what is leased.

Invariant: a broken stream ends nothing that is leased: the worker joins again under the same incarnation, renews what
it holds and lets the answers decide; the server always knows what this node holds, serves and can still take. Run by
the lifecycle; `held_leases` runs what comes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_service_pb2, task_service_pb2, version_pb2
from astraflow.errors import AstraflowError, UnauthenticatedError, UnavailableError
from astraflow.rollout.v1 import task_pb2
from astraflow_kit import failpoints
from astraflow_kit.awake import Silence
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_raas.loops import StreamService, converse
from astraflow_raas.timeline import Stage
from astraflow_raas.work.held_leases import HeldLeases, Runner

if TYPE_CHECKING:
    import grpc

log = get_logger(__name__)

WorkCall: TypeAlias = "grpc.aio.StreamStreamCall[task_service_pb2.WorkRequest, task_service_pb2.WorkResponse]"
_MAX_RENEWALS = 4096
_HEARTBEAT_S = 2.0
# A moment of patience joins bursts of leases and endings into one report.
_CREDIT_DELAY_S = 0.002
_MIN_TTL_S = 0.3
_DRAIN_SHARE = 0.75
"""Of the time for stopping: the rest is for giving leases back, for the last pushes and for ending the
engine."""


@dataclass(frozen=True, kw_only=True)
class WorkerHooks:
    """What the worker sets off elsewhere in the node."""

    announce: Callable[[version_pb2.Version], None]
    data_lost: Callable[[], None]
    durable: Callable[[int], None]
    drain_requested: Callable[[str], None]
    reached: Callable[[Stage], None] = lambda _stage: None


class Worker(StreamService):
    """Holds the stream that leases come by.

    `me` and `joined` are the node's first JoinRun and its answer; `group_size`, the episodes of a training task, is the
    unit of credits. `state` says what the node serves and waits for: credits without the numbers of tasks and leases.
    """

    def __init__(
        self,
        client: AsyncClient,
        me: run_service_pb2.JoinRunRequest,
        *,
        joined: run_service_pb2.JoinRunResponse,
        group_size: int,
        runner: Runner,
        state: Callable[[], task_service_pb2.Credits],
        hooks: WorkerHooks,
        metrics: Metrics,
        server_silence_s: float = 10.0,
    ) -> None:
        super().__init__()
        self._client = client
        self._me = me
        self._group_size = group_size
        self._state = state
        self._hooks = hooks
        self._lease_ttl_s = _ttl_s(joined)
        self._data_incarnation = joined.data_incarnation
        self._has_joined = True
        self._changed = asyncio.Event()
        self._held = HeldLeases(
            client,
            node_id=me.node_id,
            runner=runner,
            metrics=metrics,
            on_end=self._changed.set,
            on_member_end=self._place_freed,
        )
        self._most_episodes = me.max_concurrent_tasks
        self._num_offered = 0
        self._receipts: list[str] = []
        self._num_received = 0
        """Leases that came on the stream that is open."""
        self._server_silence_s = server_silence_s
        self._num_heard = 0
        """Messages of the server since the node started."""
        self._has_asked = False
        self.draining = False
        """True once the node takes no new leases."""
        self.connected = False
        """True while a working session is open."""
        self.without_server = False
        """True from the loss of a session until the next one is open."""
        self.refusal: UnauthenticatedError | None = None
        """Why the token is refused, while it is."""

    @property
    def num_held(self) -> int:
        """Leases being worked on."""
        return len(self._held.lease_ids)

    def state_changed(self) -> None:
        """Something the server should know changed: credits are sent soon."""
        self._changed.set()

    async def stop(self, *, deadline_s: float) -> None:
        """Drain for most of `deadline_s`, give back what is left, close the stream."""
        give_up_s = asyncio.get_running_loop().time() + deadline_s
        await self.drain(deadline_s=deadline_s * _DRAIN_SHARE)
        await super().stop(deadline_s=max(0.1, give_up_s - asyncio.get_running_loop().time()))

    async def drain(self, *, deadline_s: float) -> None:
        """Take no new leases, finish those held within `deadline_s`, give the others back with reason
        `drain`."""
        self.draining = True
        self._changed.set()
        failpoints.hit("raas.draining")
        log.info("node.draining", leases=self.num_held, deadline_s=round(deadline_s, 1))
        await self._held.drain(deadline_s=deadline_s)

    async def _stream(self) -> None:
        if not self._has_joined:
            await self._rejoin()
        self._has_joined, self._failures, self._num_received = False, 0, 0
        call: WorkCall = self._client.open(self._client.tasks.Work)
        try:
            await converse(call, write=self._write(call), read=self._read(call))
        finally:
            self.connected = False

    def _stream_failed(self, error: AstraflowError, *, report: Callable[..., None]) -> None:
        self.without_server = True
        self.refusal = error if isinstance(error, UnauthenticatedError) else None
        report("session.lost", reason=error.reason, message=error.message, leases=self.num_held)

    async def _rejoin(self) -> None:
        answer = await self._client.call(self._client.runs.JoinRun, self._me)
        self._lease_ttl_s = _ttl_s(answer)
        for version in answer.versions:
            self._hooks.announce(version)
        self._compare_data(answer.data_incarnation)

    def _compare_data(self, incarnation: str) -> None:
        """Another data set than before may have lost what was acknowledged and is not durable."""
        if incarnation != self._data_incarnation:
            log.warning("server.data_replaced", before=self._data_incarnation, now=incarnation)
            self._data_incarnation = incarnation
            self._hooks.data_lost()

    async def _write(self, call: WorkCall) -> None:
        """Hello with what an earlier session left, then receipts, credits and renewals until the stream ends."""
        self._receipts.clear()
        await call.write(task_service_pb2.WorkRequest(hello=self._hello()))
        self.connected, self.without_server = True, False
        loop, last = asyncio.get_running_loop(), None
        silence = Silence(period_s=_HEARTBEAT_S)
        renew_s = beat_s = loop.time()
        while True:
            if silence.look(self._num_heard) >= self._server_silence_s:
                # A connection stays open when the server, or all between, stands still.
                raise UnavailableError(
                    f"the dataflow server has said nothing for {self._server_silence_s:g} s in an open session"
                )
            if loop.time() >= renew_s:
                await self._renew(call)
                renew_s = loop.time() + self._lease_ttl_s / 3
            await self._confirm(call)
            wanted = self._credits()
            if wanted != last or loop.time() >= beat_s:
                await call.write(task_service_pb2.WorkRequest(credits=wanted))
                last, beat_s = wanted, loop.time() + _HEARTBEAT_S
                if wanted.tasks and not self._has_asked:
                    self._has_asked = True
                    self._hooks.reached(Stage.ASKED)
            until_s = min(renew_s, beat_s, loop.time() + self._server_silence_s)
            await self._wait_for_change(until_s - loop.time())

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_CREDIT_DELAY_S)
        self._changed.clear()

    def _hello(self) -> task_service_pb2.Hello:
        me, held = self._me, self._held.lease_ids
        # What is not listed is given back, so a list that the contract would cut short is left out.
        listed = task_service_pb2.Renewal(lease_ids=held) if len(held) <= _MAX_RENEWALS else None
        return task_service_pb2.Hello(
            run_id=me.run_id, node_id=me.node_id, incarnation=me.incarnation, held=listed
        )

    async def _renew(self, call: WorkCall) -> None:
        lease_ids = self._held.lease_ids
        for first in range(0, len(lease_ids), _MAX_RENEWALS):
            renewal = task_service_pb2.Renewal(lease_ids=lease_ids[first : first + _MAX_RENEWALS])
            await call.write(task_service_pb2.WorkRequest(renewal=renewal))

    async def _confirm(self, call: WorkCall) -> None:
        """Confirm which leases arrived: those that did not are given back when the stream breaks."""
        while self._receipts:
            arrived, self._receipts = self._receipts[:_MAX_RENEWALS], self._receipts[_MAX_RENEWALS:]
            receipt = task_service_pb2.Receipt(lease_ids=arrived)
            await call.write(task_service_pb2.WorkRequest(receipt=receipt))

    def _credits(self) -> task_service_pb2.Credits:
        wanted = task_service_pb2.Credits(leases_received=self._num_received)
        wanted.MergeFrom(self._state())
        if self.draining:
            wanted.waiting_for = "drain"
            wanted.serving_versions.clear()
        if not wanted.waiting_for:
            self._most_episodes = wanted.max_episodes or self._me.max_concurrent_tasks
            wanted.tasks = self._num_free
        self._num_offered = wanted.tasks
        return wanted

    @property
    def _num_free(self) -> int:
        """Tasks that there are places for."""
        return max(0, (self._most_episodes - self._held.num_episodes) // self._group_size)

    def _place_freed(self) -> None:
        if self._num_free > self._num_offered:
            self._changed.set()

    async def _read(self, call: WorkCall) -> None:
        async for response in call:
            self._num_heard += 1
            kind = response.WhichOneof("kind")
            if kind == "lease":
                self._accept(response.lease)
            elif kind == "cancel":
                self._held.cancel(response.cancel.lease_id, reason=response.cancel.reason)
            elif kind == "version":
                self._hooks.announce(response.version)
            elif kind == "watermark":
                self._compare_data(response.watermark.data_incarnation)
                self._hooks.durable(response.watermark.durable_position)
            elif kind == "drain":
                log.info("node.drain_requested", reason=response.drain.reason)
                self._hooks.drain_requested(response.drain.reason)
        log.info("session.closed_by_server", leases=self.num_held)

    def _accept(self, lease: task_pb2.Lease) -> None:
        self._num_received += 1
        self._receipts.append(lease.lease_id)
        self._changed.set()
        if lease.lease_id in self._held.lease_ids:
            return
        failpoints.hit("raas.leased")
        if self.draining:
            self._held.give_back(lease, reason="drain", detail="leased to a node that drains")
            return
        self._hooks.reached(Stage.FIRST_LEASE)
        self._held.start(lease)


def _ttl_s(joined: run_service_pb2.JoinRunResponse) -> float:
    return max(_MIN_TTL_S, joined.lease_ttl_duration.ToNanoseconds() / 1e9)
