"""Following the announced versions of one policy: fetch while the engine serves, verify, then swap.

Invariant: the engine serves the last version that was fetched and verified whole; only announced versions are
activated, numbers never go back, and whatever fails (store, digest, engine) is reported and leaves the old version
serving, or takes an engine out of service whose weights nobody knows; only a node that serves nothing yet ends when its
weights can never be read. Engines load what the mirror holds, and it does not change while they do; an evaluation that
needs the served version holds the next one back, in the mirror too, up to a deadline. The worker calls `announce`; the
lifecycle runs the loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from astraflow.client import RetryPolicy
from astraflow.dataflow.v1 import version_pb2
from astraflow.errors import AstraflowError, IncompatibleError, RetryableError
from astraflow_kit import failpoints
from astraflow_kit.log import correlated, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import Engine, EngineDoubtful, PauseMode
from astraflow_raas.engine.replicas import Replica
from astraflow_raas.loops import LoopService
from astraflow_raas.policies.canary import Canary, WeightsDiffer, compare_answers
from astraflow_raas.policies.mirror_source import MirrorSource
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.timeline import Stage
from astraflow_weights.errors import (
    CorruptManifest,
    CorruptPart,
    MirrorMismatch,
    StoreRefused,
    Unavailable,
    VerificationFailed,
)
from astraflow_weights.mirror.lock import Hold

log = get_logger(__name__)

# With nothing to serve meanwhile, waiting would hide these from whoever started the node.
_FATAL_AT_START = (IncompatibleError, MirrorMismatch, StoreRefused)
_RETRY = RetryPolicy(first_wait_s=0.2, max_wait_s=10.0)
_HOLD_POLL_S = 0.02
_MAX_PROBLEM_CHARS = 512


class _DiskFault(RetryableError):
    """This machine's disk is in the way."""

    reason, code = "DISK_FAULT", "RESOURCE_EXHAUSTED"


class WeightSync(LoopService):
    """Keeps one policy at its newest announced version. A lifecycle `Service`."""

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        source: MirrorSource,
        metrics: Metrics,
        evaluation_hold_s: float,
        running: PauseMode = PauseMode.IN_PLACE,
        canary: Canary = compare_answers,
    ) -> None:
        """`running` says what becomes of the calls that run when a newer version is swapped in."""
        super().__init__()
        self._policy = policy
        self.source = source
        """Where versions come from, and what it holds and fetched."""
        self._metrics = metrics
        self._evaluation_hold_s = evaluation_hold_s
        self._running = running
        self._canary = canary
        self._announced: version_pb2.Version | None = None
        self._news = asyncio.Event()
        self._has_weights = asyncio.Event()
        self._may_load = asyncio.Lock()
        self._num_loading = 0
        self._nobody_loads = asyncio.Event()
        self._nobody_loads.set()
        self.num_verification_failures = 0
        """Versions refused because their bytes did not verify."""
        self._held_up: version_pb2.WeightFault | None = None
        self._unproven: dict[int, version_pb2.WeightFault] = {}
        self.holding = False
        """True while a newer version waits for evaluations of the served one."""

    @property
    def fault(self) -> version_pb2.WeightFault | None:
        """What is wrong with the bytes of the version to be activated, with their store, or with what an engine makes
        of them; None when nothing is known to be.
        """
        return self._held_up or next(iter(self._unproven.values()), None)

    @property
    def announced_version(self) -> int | None:
        """Newest version the server announced to this node."""
        return self._announced.version if self._announced is not None else None

    @property
    def waiting_for(self) -> str:
        """What the policy lacks before its first token: `version`, `weights`, or nothing."""
        if self._has_weights.is_set():
            return ""
        return "version" if self._announced is None else "weights"

    def announce(self, announced: version_pb2.Version) -> None:
        """The server announced a version; one that is not newer than those known changes nothing."""
        if self._announced is None or announced.version > self._announced.version:
            if self._announced is None:
                self._policy.timeline.mark(Stage.VERSION)
            self._announced = announced
            self._news.set()

    async def wait_for_weights(self) -> None:
        """Wait until there was a version that an engine could be started with."""
        await self._has_weights.wait()

    async def prove(self, engine: Engine, *, version: int, number: int = 1) -> None:
        """Have the policy's engine of this number, which was given `version`, prove it. Raises EngineDoubtful, and
        WeightsDiffer, which is also reported until the engine of that number has proven its weights.
        """
        probe = self.source.probe(version)
        try:
            proven = await self._canary(engine, self._policy, version=version, probe=probe)
        except WeightsDiffer as error:
            log.error("engine.weights_differ", version=version, message=error.message)
            self._metrics.increment("astraflow_raas_weight_mismatches_total", policy=self._policy.policy_id)
            self._unproven[number] = version_pb2.WeightFault(
                policy_id=self._policy.policy_id, version=version, problem=error.message[:_MAX_PROBLEM_CHARS]
            )
            self._policy.on_change()
            raise
        if proven and self._unproven.pop(number, None) is not None:
            self._policy.on_change()

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[Hold]:
        """The version to start an engine with: the mirror's. Waits for a whole one, which stays as it is, and no other
        engine of the policy is given a newer one, until the block ends.
        """
        await self._has_weights.wait()
        while (held := await self._begin_loading()) is None:  # noqa: ASYNC110 - another thread repairs it
            await asyncio.sleep(_HOLD_POLL_S)
        try:
            yield held
        finally:
            held.release()
            self._num_loading -= 1
            if not self._num_loading:
                self._nobody_loads.set()

    async def _begin_loading(self) -> Hold | None:
        async with self._may_load:
            held = self.source.try_hold()
            if held is not None:
                self._num_loading += 1
                self._nobody_loads.clear()
            return held

    @asynccontextmanager
    async def _moving_on(self) -> AsyncIterator[None]:
        """Nobody begins to rely on the served version, and no engine is being started, while the block runs."""
        self._policy.is_moving_on = True
        try:
            async with self._may_load:
                await self._nobody_loads.wait()
                yield
        finally:
            self._policy.is_moving_on = False

    async def _loop(self) -> None:
        """Fetch and activate the newest announced version, again and again."""
        failures = 0
        while True:
            await self._news.wait()
            self._news.clear()
            if await self._follow(self._announced):
                failures = 0
                self._clear_fault()
                continue
            failures += 1
            await asyncio.sleep(_RETRY.wait_s(failures))
            self._news.set()

    async def _follow(self, announced: version_pb2.Version | None) -> bool:
        """One version, from the store into the engine; False when it should be tried again."""
        assert announced is not None, "woken without an announcement"
        with correlated(policy_id=announced.policy_id, version=announced.version):
            try:
                await self._prefetch(announced)
                if self._policy.is_served or self._policy.num_pins:
                    await self._wait_for_evaluations()
                async with self._moving_on():
                    await self._activate(announced.version, await self._fetch(announced))
            except AstraflowError as error:
                if not self._has_weights.is_set() and isinstance(error, _FATAL_AT_START):
                    raise
                self._failed(announced, error)
                return False
            except OSError as error:
                self._failed(
                    announced,
                    _DiskFault(f"the mirror cannot be written: {error}; free space or fix its mode"),
                )
                return False
        return True

    async def _prefetch(self, announced: version_pb2.Version) -> None:
        started_s = time.monotonic()
        try:
            await asyncio.to_thread(self.source.prefetch, announced)
        except VerificationFailed as failure:
            # Fetching for good goes around it, or says so.
            log.warning("weights.prefetch_failed", message=failure.message)
        took_s = time.monotonic() - started_s
        self._metrics.observe("astraflow_raas_fetch_seconds", took_s, policy=announced.policy_id)

    async def _fetch(self, announced: version_pb2.Version) -> Path:
        started_s = time.monotonic()
        model_dir = await asyncio.to_thread(self.source.fetch, announced)
        took_s = time.monotonic() - started_s
        self._metrics.observe("astraflow_raas_apply_seconds", took_s, policy=announced.policy_id)
        log.info("weights.fetched", seconds=round(took_s, 4), model_dir=str(model_dir))
        return model_dir

    async def _activate(self, version: int, model_dir: Path) -> None:
        await self._policy.read_tokenizer(model_dir)
        # Engines that are down are started with what the mirror holds.
        behind = [
            each for each in self._policy.engines if each.engine is not None and each.version != version
        ]
        faults = await asyncio.gather(*map(self._swap, behind), return_exceptions=True)
        for fault in filter(None, faults):
            raise fault
        if not self._has_weights.is_set():
            self._policy.timeline.mark(Stage.WEIGHTS)
            self._has_weights.set()

    async def _wait_for_evaluations(self) -> None:
        self.holding = True
        try:
            released = await self._policy.wait_unpinned(deadline_s=self._evaluation_hold_s)
        finally:
            self.holding = False
        if not released:
            log.warning(
                "weights.evaluation_overrun", pins=self._policy.num_pins, waited_s=self._evaluation_hold_s
            )

    async def _swap(self, replica: Replica) -> None:
        failpoints.hit("raas.activate")
        started_s, engine = time.monotonic(), replica.engine
        assert engine is not None, "only engines that are up are given weights"
        replica.is_swapping = True
        try:
            version = await self._load_or_repair(engine, number=replica.number)
        except EngineDoubtful as error:
            replica.distrust(error)
            # Its answers are not believed any more, those under way neither.
            await engine.close()
            raise
        finally:
            replica.is_swapping = False
        took_s = time.monotonic() - started_s
        if replica.engine is engine:
            replica.serves(version)
        self._metrics.observe("astraflow_raas_swap_seconds", took_s, policy=self._policy.policy_id)
        log.info("weights.activated", seconds=round(took_s, 4), engine=replica.number)
        failpoints.hit("raas.activated")

    async def _load_or_repair(self, engine: Engine, *, number: int) -> int:
        """The version that the engine has proven. Raises EngineDoubtful when it must be replaced."""
        try:
            return await self._load(engine, self._running, number=number)
        except WeightsDiffer as differ:
            # What is running has sampled with weights that nobody knows.
            try:
                version = await self._load(engine, PauseMode.ABORT, number=number)
            except AstraflowError as error:
                raise EngineDoubtful(f"{differ.message}; loaded again: {error.message}") from error
            log.info("engine.weights_repaired", version=version)
            return version

    async def _load(self, engine: Engine, running: PauseMode, *, number: int) -> int:
        held = await self._hold()
        try:
            changes = self.source.changes(held.version) if running is not PauseMode.ABORT else None
            await engine.swap(
                model_dir=held.directory, version=held.version, running=running, changes=changes
            )
            await self.prove(engine, version=held.version, number=number)
        finally:
            held.release()
        return held.version

    async def _hold(self) -> Hold:
        held = self.source.try_hold()
        while held is None:
            await asyncio.sleep(_HOLD_POLL_S)
            held = self.source.try_hold()
        return held

    def _clear_fault(self) -> None:
        if self._held_up is not None:
            self._held_up = None
            self._policy.on_change()

    def _failed(self, announced: version_pb2.Version, error: AstraflowError) -> None:
        """The old version keeps serving. Bad bytes are counted apart: they are somebody's fault to find."""
        damaged = isinstance(error, VerificationFailed | CorruptPart | CorruptManifest)
        if damaged:
            self.num_verification_failures += 1
        if damaged or self.source.damage is not None or isinstance(error, Unavailable):
            self._held_up = _fault(announced, error if damaged else self.source.damage or error)
            self._policy.on_change()
        self._metrics.increment(
            "astraflow_raas_version_failures_total", policy=announced.policy_id, reason=error.reason
        )
        report = log.error if damaged else log.warning
        report(
            "weights.refused", reason=error.reason, message=error.message, still_serving=self._policy.version
        )


def _fault(announced: version_pb2.Version, error: AstraflowError) -> version_pb2.WeightFault:
    """What is reported to the server."""
    fault = version_pb2.WeightFault(
        policy_id=announced.policy_id, version=announced.version, problem=error.message[:_MAX_PROBLEM_CHARS]
    )
    if isinstance(error, Unavailable):
        fault.waiting_for = error.wait
    if isinstance(error, VerificationFailed):
        fault.version, fault.tensor = error.version, error.tensor
        if error.tile is not None:
            fault.tile = error.tile
    return fault
