"""Keeps one engine of a policy up: brings it up with the current weights, watches it, brings up the next
one.

Invariant: calls flow only while an engine is healthy and serves a known version; a dead or stuck engine is
replaced with backoff and comes back with the weights that were served, while the policy's calls wait.
`ChildHost` owns a child process, `RemoteHost` an engine that somebody else runs, `AdapterHost` a part of another
policy's. Run by the lifecycle.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from astraflow.client import RetryPolicy
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import engine_load_pb2
from astraflow_kit.awake import within
from astraflow_kit.log import correlated, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.adapter import AdapterEngine
from astraflow_raas.engine.base import AdapterServer, Engine, EngineFaulty, EngineHung, EngineUnavailable
from astraflow_raas.engine.process import EngineProcess
from astraflow_raas.engine.replicas import Replica
from astraflow_raas.engine.server_info import EngineUnsuitable
from astraflow_raas.loops import LoopService
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.policies.weight_sync import WeightSync
from astraflow_raas.timeline import Stage

log = get_logger(__name__)

_MAX_BACKOFF_S = 30.0
_MAX_DETAIL = 512
_STABLE_S = 60.0
"""An engine that lived this long starts the backoff over."""
_MAX_FAILED_STARTS = 4
"""An engine that never became ready in so many further starts ends the node: people must look at its log."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Bounds of bringing an engine up and of trusting it."""

    start_timeout_s: float
    stall_s: float
    first_backoff_s: float
    watch_s: float = 1.0
    """How often the engine is looked at."""


class Launch(Protocol):
    """Starts an engine with a checkpoint folder; it is not healthy yet."""

    async def __call__(self, *, model_dir: Path, version: int) -> EngineProcess:
        """Raises EngineUnavailable when it cannot be started."""


StartT = TypeVar("StartT")


class _Host(LoopService, Generic[StartT]):
    """What both hosts share: the loop around one engine after the other, which `start` brings up."""

    def __init__(
        self,
        policy: ServedPolicy,
        weights: WeightSync,
        start: StartT,
        *,
        replica: Replica,
        settings: HostSettings,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self._start = start
        self._policy = policy
        self._replica = replica
        self._weights = weights
        self._settings = settings
        self._metrics = metrics
        self._was_ready = False
        self.num_restarts = 0
        """Engines that were lost since the node started."""
        self.fault: engine_load_pb2.EngineFault | None = None
        """Why the last one was lost, until the next one serves."""

    async def _loop(self) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        with correlated(policy_id=self._policy.policy_id):
            await self._weights.wait_for_weights()
            while True:
                started_s = loop.time()
                try:
                    await self._one_engine()
                except (EngineUnavailable, EngineFaulty) as error:
                    self._lost(error)
                    if not self._was_ready and failures >= _MAX_FAILED_STARTS:
                        raise
                failures = 1 if loop.time() - started_s > _STABLE_S else failures + 1
                await asyncio.sleep(self._backoff_s(failures))

    async def _one_engine(self) -> None:
        """Bring one engine up and watch it. Raises EngineUnavailable or EngineFaulty when it is lost."""
        raise NotImplementedError

    def _ready(self, engine: Engine, *, version: int) -> None:
        self._was_ready, self.fault = True, None
        self._replica.ready(engine, version=version)
        self._policy.timeline.mark(Stage.ENGINE_READY)
        log.info("engine.ready", engine=self._replica.number, version=version)

    def _lost(self, error: AstraflowError) -> None:
        self.num_restarts += 1
        self.fault = engine_load_pb2.EngineFault(
            policy_id=self._policy.policy_id,
            engine=self._replica.number,
            reason="engine_hung" if isinstance(error, EngineHung) else "engine_lost",
            detail=error.message[:_MAX_DETAIL],
        )
        self._metrics.increment("astraflow_raas_engine_losses_total", policy=self._policy.policy_id)
        log.error(
            "engine.lost",
            engine=self._replica.number,
            reason=error.reason,
            message=error.message,
            calls=self._replica.num_calls,
        )

    def _backoff_s(self, failures: int) -> float:
        backoff = RetryPolicy(first_wait_s=self._settings.first_backoff_s, max_wait_s=_MAX_BACKOFF_S)
        return backoff.wait_s(failures)

    async def _prove_progress(self, engine: Engine) -> None:
        """Raises EngineHung when the engine has made no token for `stall_s`, as far as answers and a probe can tell, be
        it busy or idle; while it takes up weights, when it does not even say which it serves.
        """
        if self._replica.is_swapping:
            await engine.served_version()
            return
        loop, stall_s = asyncio.get_running_loop(), self._settings.stall_s
        silent_s = loop.time() - self._replica.last_answer_s
        if silent_s < stall_s / 4:
            return
        # Long answers are no fault: the engine only has to show that it still makes tokens.
        try:
            await within(engine.check_health(), max(stall_s / 2, stall_s - silent_s))
        except (TimeoutError, EngineHung) as error:
            if self._replica.is_swapping:
                return  # it was paused meanwhile
            raise EngineHung(
                f"the engine has made no token for {loop.time() - self._replica.last_answer_s:.1f} s, with "
                f"{self._replica.num_calls} calls in it"
            ) from error
        self._replica.answered()


class ChildHost(_Host[Launch]):
    """Runs the engine as a child process; it is launched with the folder and number of a version."""

    async def _one_engine(self) -> None:
        process: EngineProcess | None = None
        try:
            async with self._weights.loading() as held:
                self._policy.timeline.mark(Stage.ENGINE_LAUNCHED)
                process = await self._start(model_dir=held.directory, version=held.version)
                await self._wait_healthy(process)
                await process.engine.introduce()
                await _require_version(process.engine, held.version)
                await self._weights.prove(process.engine, version=held.version, number=self._replica.number)
                self._ready(process.engine, version=held.version)
            await self._until_lost(process)
        finally:
            self._replica.lost()
            if process is not None:
                await asyncio.shield(process.end())

    async def _wait_healthy(self, process: EngineProcess) -> None:
        try:
            await process.wait_healthy(timeout_s=self._settings.start_timeout_s)
        except EngineUnsuitable as error:
            if not self._was_ready:
                raise
            # It has served this model: the folder is at fault, which another version mends.
            raise EngineUnavailable(error.message) from error

    async def _until_lost(self, process: EngineProcess) -> None:
        """Raises EngineUnavailable once the process ended or stopped making tokens."""
        ended = asyncio.ensure_future(process.ended())
        try:
            while not (await asyncio.wait((ended,), timeout=self._settings.watch_s))[0]:
                self._replica.require_trust()
                await self._prove_progress(process.engine)
        finally:
            ended.cancel()
        raise EngineUnavailable(f"the engine ended with code {ended.result()}:\n{process.log_tail()}")


class RemoteHost(_Host[Callable[[], Engine]]):
    """Uses an engine that somebody else runs, which sees the node's mirror under the same path; `start` connects."""

    async def _one_engine(self) -> None:
        engine = self._start()
        try:
            async with self._weights.loading() as held:
                # A node that was killed in the middle of a swap leaves its engine paused.
                await engine.resume()
                await engine.introduce()
                await engine.check_health()
                # Whatever it is called, what it holds was not loaded by this process.
                await engine.swap(model_dir=held.directory, version=held.version)
                await self._weights.prove(engine, version=held.version, number=self._replica.number)
                self._ready(engine, version=held.version)
            while True:
                await asyncio.sleep(self._settings.watch_s)
                await self._still_ours(engine)
        finally:
            self._replica.lost()
            await engine.close()

    async def _still_ours(self, engine: Engine) -> None:
        """Its owner may have restarted it: then it serves other weights than we say. Raises EngineFaulty."""
        self._replica.require_trust()
        await self._prove_progress(engine)
        before = self._replica.version
        served = await engine.served_version()
        changed_meanwhile = self._replica.is_swapping or self._replica.version != before
        if served != before and not changed_meanwhile:
            raise EngineFaulty(f"the engine serves version {served} now, this node gave it version {before}")


class AdapterHost(_Host[Replica]):
    """Loads a policy's adapter into the engine of its base, which `start` is, and follows that engine, whose own host
    finds out when it hangs.
    """

    async def _one_engine(self) -> None:
        server = await self._server()
        engine = AdapterEngine(server, policy_id=self._policy.policy_id)
        try:
            async with self._weights.loading() as held:
                await engine.swap(model_dir=held.directory, version=held.version)
                await self._weights.prove(engine, version=held.version, number=self._replica.number)
                self._ready(engine, version=held.version)
            while self._start.engine is server:
                await asyncio.sleep(self._settings.watch_s)
                self._replica.require_trust()
        finally:
            self._replica.lost()
            if self._start.engine is server:
                await engine.close()
        raise EngineUnavailable(
            "the engine of the base policy is gone; its next one is given the adapter again"
        )

    async def _server(self) -> AdapterServer:
        """The base's engine, once there is one."""
        while (server := self._start.engine) is None:  # noqa: ASYNC110 - another host brings it up
            await asyncio.sleep(self._settings.watch_s)
        assert isinstance(server, AdapterServer), "only policies with an engine of their own are adapted"
        return server


async def _require_version(engine: Engine, version: int | None) -> None:
    served = await engine.served_version()
    if served != version:
        raise EngineFaulty(f"the engine serves version {served}, this node gave it version {version}")
