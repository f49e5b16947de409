"""The leases this node works on, each until its work ends.

Invariant: a lease is worked on only until the server says that it is no longer ours; every one ends as finished, as one
reported failure, or as cancelled by the server. Owned by `worker`, which learns of leases and cancels from its stream.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import task_service_pb2
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import task_pb2
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.unit_of_work import task_correlation, unit_of_work
from astraflow_raas.work.lease import is_evaluation
from astraflow_raas.work.session import Failure

log = get_logger(__name__)

_REPORT_RETRY = RetryPolicy(total_s=10.0)


class Runner(Protocol):
    """What runs a lease; `session.Session` in a node."""

    async def run(self, lease: task_pb2.Lease, *, member_ended: Callable[[], None]) -> Failure | None:
        """Run the lease; None when the server answered for each of its members. Calls `member_ended` at the end of each
        episode, before the server has it.
        """


@dataclass(eq=False)
class _Held:
    lease: task_pb2.Lease
    work: "asyncio.Task[None]"
    num_episodes: int
    """Members that have not ended."""
    abandoned_for: str = ""


class HeldLeases:
    """Runs leases side by side. `on_end` is called whenever one has ended, `on_member_end` at the end of an episode."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        node_id: str,
        runner: Runner,
        metrics: Metrics,
        on_end: Callable[[], None],
        on_member_end: Callable[[], None],
    ) -> None:
        self._client = client
        self._node_id = node_id
        self._runner = runner
        self._metrics = metrics
        self._on_end = on_end
        self._on_member_end = on_member_end
        self._held: dict[str, _Held] = {}
        self._background: set[asyncio.Task[None]] = set()

    @property
    def lease_ids(self) -> list[str]:
        """Leases being worked on, the oldest first."""
        return list(self._held)

    @property
    def num_episodes(self) -> int:
        """Those that run: an evaluation task has one where a training task has a group. What only waits for the
        server's answer, or for the slowest of its group, takes no place.
        """
        return sum(held.num_episodes for held in self._held.values())

    def start(self, lease: task_pb2.Lease) -> None:
        """Begin to work on a lease that is not held yet."""
        work = asyncio.create_task(self._work(lease))
        self._held[lease.lease_id] = _Held(lease=lease, work=work, num_episodes=len(lease.members))
        purpose = "evaluation" if is_evaluation(lease) else "training"
        self._metrics.increment("astraflow_raas_leases_total", purpose=purpose)

    def cancel(self, lease_id: str, *, reason: str) -> None:
        """The server took the lease away: stop its work and report nothing."""
        held = self._held.get(lease_id)
        if held is not None:
            log.info("lease.cancelled", lease_id=lease_id, reason=reason)
            held.abandoned_for = reason
            held.work.cancel()

    def give_back(self, lease: task_pb2.Lease, *, reason: str, detail: str) -> None:
        """Report that the lease is not run to its end here; another node may."""
        self._spawn(self._report(lease, Failure(reason=reason, detail=detail, retryable=True)))

    async def drain(self, *, deadline_s: float) -> None:
        """Finish what is held within `deadline_s`, give the rest back with reason `drain`."""
        if self._held:
            await asyncio.wait([held.work for held in self._held.values()], timeout=deadline_s)
        for held in list(self._held.values()):
            held.abandoned_for = "drain"
            held.work.cancel()
            detail = f"not finished within the drain's {deadline_s:.1f} s"
            self.give_back(held.lease, reason="drain", detail=detail)
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _work(self, lease: task_pb2.Lease) -> None:
        failure: Failure | None = None
        with unit_of_work(task_correlation(lease.task.task_id), task_id=lease.task.task_id):
            try:
                log.debug("lease.started", attempt=lease.attempt, members=len(lease.members))
                failure = await self._runner.run(
                    lease, member_ended=partial(self._member_ended, lease.lease_id)
                )
            except Exception as error:
                log.error("lease.crashed", exc_info=error)
                detail = f"the node failed to run the task: {type(error).__name__}: {error}"
                failure = Failure(reason="workflow_error", detail=detail, retryable=True)
            finally:
                held = self._held.pop(lease.lease_id)
                self._on_end()
                outcome = held.abandoned_for or (failure.reason if failure else "finished")
                self._metrics.increment("astraflow_raas_leases_ended_total", outcome=outcome)
                log.debug("lease.ended", outcome=outcome)
            if failure is not None:
                self._spawn(self._report(lease, failure))

    def _member_ended(self, lease_id: str) -> None:
        held = self._held.get(lease_id)
        if held is not None:
            held.num_episodes -= 1
            self._on_member_end()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _report(self, lease: task_pb2.Lease, failure: Failure) -> None:
        message = task_service_pb2.LeaseFailure(
            lease_id=lease.lease_id,
            reason=failure.reason,
            detail=failure.clipped_detail,
            retryable=failure.retryable,
        )
        request = task_service_pb2.FailTaskRequest(
            run_id=lease.run_id, node_id=self._node_id, failure=message
        )
        with unit_of_work(task_correlation(lease.task.task_id), task_id=lease.task.task_id):
            log.warning(
                "lease.given_back", lease_id=lease.lease_id, reason=failure.reason, detail=failure.detail
            )
            try:
                await self._client.call(self._client.tasks.FailTask, request, retry=_REPORT_RETRY)
            except AstraflowError as error:
                # The lease runs out by itself: another node only gets the task later.
                log.warning(
                    "lease.report_failed", lease_id=lease.lease_id, reason=error.reason, message=error.message
                )
