"""Has a pool of nodes follow the target that the dataflow server decides.

Invariant: whoever resizes hears of every change, and again, ever later, until it succeeded; while the server does
not answer, the pool keeps its size. KEDA needs none of this: it reads the same target by itself. Used by the launcher
for its own nodes, and by `astraflow autoscale` for those of others.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import AstraflowError, InvalidArgumentError, NotFoundError
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_ONCE = RetryPolicy(total_s=0.0)
_TIMEOUT_S = 5.0
_LONGEST_PAUSE_S = 60.0


class PoolActuator(Protocol):
    """What can resize one pool."""

    async def resize(self, nodes: int) -> None:
        """Let the pool have so many nodes, now or soon; those that are too many drain. Asking twice is harmless.

        Raises AstraflowError when that cannot be begun; it is then asked again.
        """


@dataclass(frozen=True, kw_only=True)
class Resized:
    """What an actuator was asked for, and what went wrong; empty when nothing did."""

    nodes: int
    reason: str
    problem: str = ""


class PoolFollower:
    """Has `actuator` follow the target of `pool`. `tell` hears of each attempt, and of a server that is away."""

    def __init__(
        self,
        client: AsyncClient,
        actuator: PoolActuator,
        *,
        run_id: str,
        pool: str,
        period_s: float = 5.0,
        tell: Callable[[Resized], None] = lambda _: None,
    ) -> None:
        self._client, self._actuator = client, actuator
        self._run_id, self._pool, self._period_s, self._tell = run_id, pool, period_s, tell
        self._nodes: int | None = None
        self._failures = 0

    async def run(self, until: asyncio.Event) -> None:
        """Follow until the event is set or the run is gone. Raises InvalidArgumentError for a pool without a target,
        NotFoundError for a run that there never was.
        """
        while not until.is_set():
            try:
                pause_s = await self.round()
            except NotFoundError:
                if self._nodes is None:
                    raise
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), pause_s)

    async def round(self) -> float:
        """Look once, and resize where the target is another; returns the pause until the next look, in seconds."""
        try:
            wanted, reason = await self._target()
        except (InvalidArgumentError, NotFoundError):
            raise
        except AstraflowError as error:
            log.warning("pool.target_unknown", pool=self._pool, reason=error.reason, message=error.message)
            return self._period_s
        if wanted == self._nodes:
            return self._period_s
        try:
            await self._actuator.resize(wanted)
        except AstraflowError as error:
            self._failures += 1
            pause_s = min(_LONGEST_PAUSE_S, self._period_s * 2.0 ** min(self._failures, 16))
            problem = f"{error.message}; tried again in {pause_s:.0f} s"
            log.warning("pool.not_resized", pool=self._pool, nodes=wanted, message=problem)
            self._tell(Resized(nodes=wanted, reason=reason, problem=problem))
            return pause_s
        self._nodes, self._failures = wanted, 0
        log.info("pool.resized", pool=self._pool, nodes=wanted, reason=reason)
        self._tell(Resized(nodes=wanted, reason=reason))
        return self._period_s

    async def _target(self) -> tuple[int, str]:
        request = pb.PoolReportRequest(run_id=self._run_id)
        report = await self._client.call(
            self._client.admin.PoolReport, request, timeout_s=_TIMEOUT_S, retry=_ONCE
        )
        for load in report.pools:
            if load.pool == self._pool and load.HasField("target_nodes"):
                return load.target_nodes, report.autoscaling.reason
        known = ", ".join(sorted(report.autoscaling.pools)) or "none"
        raise InvalidArgumentError(
            f"raas.autoscaling of the run has no pool {self._pool!r}, it names {known}; give one of these, or create "
            "the run with --set 'raas.autoscaling={pools: {NAME: {max_nodes: 8}}}'"
        )
