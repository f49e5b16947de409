"""The node's working session with the dataflow server: join, hold the `Work` stream, run what is leased.

Invariant: a lease is worked on only until the server says that it is no longer ours; a broken stream kills
nothing that is leased: the worker joins again under the same incarnation, renews what it holds and lets the
answers decide. Every lease ends as finished, as one reported failure, or as cancelled by the server. Run by
the lifecycle.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_service_pb2, task_service_pb2, version_pb2
from astraflow.errors import AstraflowError, InternalError, RetryableError
from astraflow.rollout.v1 import task_pb2
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.unit_of_work import task_correlation, unit_of_work
from astraflow_raas.loops import LoopService
from astraflow_raas.streams import converse
from astraflow_raas.timeline import Stage
from astraflow_raas.work.lease import is_evaluation
from astraflow_raas.work.session import Failure

if TYPE_CHECKING:
    import grpc

log = get_logger(__name__)

WorkCall: TypeAlias = "grpc.aio.StreamStreamCall[task_service_pb2.WorkRequest, task_service_pb2.WorkResponse]"
_RECONNECT = RetryPolicy(first_wait_s=0.1, max_wait_s=2.0)
_TELL_EVERY = 15
"""Failed attempts to reach the server of which one is worth a line: one in half a minute."""
_REPORT_PATIENCE = RetryPolicy(total_s=10.0)
_MAX_RENEWALS = 4096
_HEARTBEAT_S = 2.0
# A moment of patience joins bursts of leases and endings into one report.
_CREDIT_DELAY_S = 0.002
_MIN_TTL_S = 0.3
_DRAIN_SHARE = 0.75
"""Of the time for stopping: the rest is for giving leases back, for the last pushes and for ending the
engine."""


class Runner(Protocol):
    """What runs a lease; `session.Session` in a node."""

    async def run(self, lease: task_pb2.Lease) -> Failure | None:
        """Run the lease; None when the server answered for each of its members."""


class NodeState(Protocol):
    """What the worker tells the server about the node."""

    @property
    def serving_versions(self) -> Mapping[str, int]:
        """Version each ready policy serves."""

    @property
    def tokens_sampled(self) -> int:
        """Tokens since the process started."""

    @property
    def engine_restarts(self) -> int:
        """Engines lost since the process started."""

    @property
    def weight_faults(self) -> Sequence[version_pb2.WeightFault]:
        """Versions that cannot be activated because their bytes are wrong."""

    @property
    def waiting_for(self) -> str:
        """What keeps the node from working, a slug; empty when nothing does."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who the node is in which run."""

    run_id: str
    node_id: str
    incarnation: int
    region: str
    pool: str
    engines: tuple[str, ...]
    max_concurrent_tasks: int
    group_size: int
    """Episodes of a training task: the unit of credits."""


@dataclass(frozen=True, kw_only=True)
class WorkerHooks:
    """What the worker sets off elsewhere in the node."""

    announce: Callable[[version_pb2.Version], None]
    data_lost: Callable[[], None]
    durable: Callable[[int], None]
    drained_by_server: Callable[[str], None]
    reached: Callable[[Stage], None] = lambda _stage: None


@dataclass(eq=False)
class _Held:
    """A lease being worked on, until its work ends."""

    lease: task_pb2.Lease
    work: "asyncio.Task[None]"
    abandoned_for: str = ""


class Worker(LoopService):
    """Holds leases and the stream they come by. `joined` is the answer to the node's first JoinRun."""

    def __init__(
        self,
        client: AsyncClient,
        membership: Membership,
        *,
        joined: run_service_pb2.JoinRunResponse,
        runner: Runner,
        state: NodeState,
        hooks: WorkerHooks,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self._client = client
        self._membership = membership
        self._runner = runner
        self._state = state
        self._hooks = hooks
        self._metrics = metrics
        self._lease_ttl_s = _ttl_s(joined)
        self._data_incarnation = joined.data_incarnation
        self._held: dict[str, _Held] = {}
        self._receipts: list[str] = []
        self._num_received = 0
        """Leases that came on the stream that is open."""
        self._has_asked = False
        self._background: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.draining = False
        """True once the node takes no new leases."""
        self.connected = False
        """True while a working session is open."""
        self.without_server = False
        """True from the loss of a session until the next one is open."""

    @property
    def num_held(self) -> int:
        """Leases being worked on."""
        return len(self._held)

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
        if self._held:
            await asyncio.wait([held.work for held in self._held.values()], timeout=deadline_s)
        for held in list(self._held.values()):
            self._abandon(held, "drain")
            detail = f"not finished within the drain's {deadline_s:.1f} s"
            self._spawn(self._report(held.lease, Failure(reason="drain", detail=detail, retryable=True)))
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _loop(self) -> None:
        """One session after the other. Raises when the server refuses the node for good."""
        failures, joined = 0, True
        while True:
            try:
                if not joined:
                    await self._rejoin()
                joined, failures = False, 0
                await self._session()
            except (RetryableError, InternalError) as error:
                failures, self.without_server = failures + 1, True
                tell = log.info if failures % _TELL_EVERY == 1 else log.debug
                tell("session.lost", reason=error.reason, message=error.message, leases=self.num_held)
            await asyncio.sleep(_RECONNECT.wait_s(max(1, failures)))

    async def _rejoin(self) -> None:
        answer = await self._client.call(self._client.runs.JoinRun, join_request(self._membership))
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

    async def _session(self) -> None:
        self._num_received = 0
        call: WorkCall = self._client.open(self._client.tasks.Work)
        try:
            await converse(call, write=self._write(call), read=self._read(call))
        finally:
            self.connected = False

    async def _write(self, call: WorkCall) -> None:
        """Hello with what an earlier session left, then receipts, credits and renewals until the stream ends."""
        self._receipts.clear()
        await call.write(task_service_pb2.WorkRequest(hello=self._hello()))
        self.connected, self.without_server = True, False
        loop, last = asyncio.get_running_loop(), None
        renew_s = beat_s = loop.time()
        while True:
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
            await self._wait_for_change(min(renew_s, beat_s) - loop.time())

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_CREDIT_DELAY_S)
        self._changed.clear()

    async def _renew(self, call: WorkCall) -> None:
        lease_ids = list(self._held)
        for first in range(0, len(lease_ids), _MAX_RENEWALS):
            renewal = task_service_pb2.Renewal(lease_ids=lease_ids[first : first + _MAX_RENEWALS])
            await call.write(task_service_pb2.WorkRequest(renewal=renewal))

    def _hello(self) -> task_service_pb2.Hello:
        me, held = self._membership, list(self._held)
        # What is not listed is given back, so a list that the contract would cut short is left out.
        listed = task_service_pb2.Renewal(lease_ids=held) if len(held) <= _MAX_RENEWALS else None
        return task_service_pb2.Hello(
            run_id=me.run_id, node_id=me.node_id, incarnation=me.incarnation, held=listed
        )

    async def _confirm(self, call: WorkCall) -> None:
        """Tell which leases arrived: those that did not are given back when the stream breaks."""
        while self._receipts:
            arrived, self._receipts = self._receipts[:_MAX_RENEWALS], self._receipts[_MAX_RENEWALS:]
            receipt = task_service_pb2.Receipt(lease_ids=arrived)
            await call.write(task_service_pb2.WorkRequest(receipt=receipt))

    def _credits(self) -> task_service_pb2.Credits:
        # Counted in episodes: an evaluation task has one where a training task has a group of them.
        group_size = self._membership.group_size
        held = sum(len(held.lease.members) for held in self._held.values())
        free = self._membership.max_concurrent_tasks * group_size - held
        closed = self.draining or self._state.waiting_for
        return task_service_pb2.Credits(
            tasks=0 if closed else max(0, free // group_size),
            serving_versions={} if self.draining else self._state.serving_versions,
            tokens_sampled=self._state.tokens_sampled,
            engine_restarts=self._state.engine_restarts,
            weight_faults=self._state.weight_faults,
            waiting_for="drain" if self.draining else self._state.waiting_for,
            leases_received=self._num_received,
        )

    async def _read(self, call: WorkCall) -> None:
        async for response in call:
            kind = response.WhichOneof("kind")
            if kind == "lease":
                self._accept(response.lease)
            elif kind == "cancel":
                self._cancel(response.cancel)
            elif kind == "version":
                self._hooks.announce(response.version)
            elif kind == "watermark":
                self._compare_data(response.watermark.data_incarnation)
                self._hooks.durable(response.watermark.durable_position)
            elif kind == "drain":
                log.info("node.told_to_drain", reason=response.drain.reason)
                self._hooks.drained_by_server(response.drain.reason)
        log.info("session.closed_by_server", leases=self.num_held)

    def _accept(self, lease: task_pb2.Lease) -> None:
        self._num_received += 1
        self._receipts.append(lease.lease_id)
        self._changed.set()
        if lease.lease_id in self._held:
            return
        failpoints.hit("raas.leased")
        if self.draining:
            failure = Failure(reason="drain", detail="leased to a node that drains", retryable=True)
            self._spawn(self._report(lease, failure))
            return
        self._hooks.reached(Stage.FIRST_LEASE)
        work = asyncio.create_task(self._work(lease))
        self._held[lease.lease_id] = _Held(lease=lease, work=work)
        self._metrics.increment("astraflow_raas_leases_total", purpose=_purpose(lease))

    def _cancel(self, cancel: task_service_pb2.Cancel) -> None:
        held = self._held.get(cancel.lease_id)
        if held is not None:
            log.info("lease.cancelled", lease_id=cancel.lease_id, reason=cancel.reason)
            self._abandon(held, cancel.reason)

    def _abandon(self, held: _Held, reason: str) -> None:
        held.abandoned_for = reason
        held.work.cancel()

    async def _work(self, lease: task_pb2.Lease) -> None:
        failure: Failure | None = None
        with unit_of_work(task_correlation(lease.task.task_id), task_id=lease.task.task_id):
            try:
                log.debug("lease.started", attempt=lease.attempt, members=len(lease.members))
                failure = await self._runner.run(lease)
            except Exception as error:
                log.error("lease.crashed", exc_info=error)
                detail = f"the node failed to run the task: {type(error).__name__}: {error}"
                failure = Failure(reason="workflow_error", detail=detail, retryable=True)
            finally:
                held = self._held.pop(lease.lease_id)
                self._changed.set()
                outcome = held.abandoned_for or (failure.reason if failure else "finished")
                self._metrics.increment("astraflow_raas_leases_ended_total", outcome=outcome)
                log.debug("lease.ended", outcome=outcome)
            if failure is not None:
                self._spawn(self._report(lease, failure))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _report(self, lease: task_pb2.Lease, failure: Failure) -> None:
        with unit_of_work(task_correlation(lease.task.task_id), task_id=lease.task.task_id):
            await self._send_failure(lease.lease_id, failure)

    async def _send_failure(self, lease_id: str, failure: Failure) -> None:
        message = task_service_pb2.LeaseFailure(
            lease_id=lease_id,
            reason=failure.reason,
            detail=failure.clipped_detail,
            retryable=failure.retryable,
        )
        request = task_service_pb2.FailTaskRequest(
            run_id=self._membership.run_id, node_id=self._membership.node_id, failure=message
        )
        log.warning("lease.given_back", lease_id=lease_id, reason=failure.reason, detail=failure.detail)
        try:
            await self._client.call(self._client.tasks.FailTask, request, retry=_REPORT_PATIENCE)
        except AstraflowError as error:
            # The lease runs out by itself: the task is only later on its way to another node.
            log.warning("lease.report_failed", lease_id=lease_id, reason=error.reason, message=error.message)


def join_request(membership: Membership) -> run_service_pb2.JoinRunRequest:
    """The JoinRun request of a node; the same at each reconnect."""
    return run_service_pb2.JoinRunRequest(
        run_id=membership.run_id,
        node_id=membership.node_id,
        incarnation=membership.incarnation,
        region=membership.region,
        pool=membership.pool,
        engines=membership.engines,
        # Tasks of one episode (evaluations) count here too; credits keep training tasks at their own bound.
        max_concurrent_tasks=membership.max_concurrent_tasks * membership.group_size,
    )


def _ttl_s(joined: run_service_pb2.JoinRunResponse) -> float:
    return max(_MIN_TTL_S, joined.lease_ttl_duration.ToNanoseconds() / 1e9)


def _purpose(lease: task_pb2.Lease) -> str:
    return "evaluation" if is_evaluation(lease) else "training"
