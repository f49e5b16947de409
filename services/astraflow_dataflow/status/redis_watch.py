"""Watching Redis, each primary of a cluster by itself: a probe every moment that it answers, writes and is quick; what
it lacks is a wait of the runs that it has.

A probe is a write that changes nothing and that Redis refuses whenever it refuses writes. Once it hangs, all calls fail
at once instead of holding their callers. One per process, run by `server`; read by reporting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from astraflow.errors import AstraflowError
from astraflow_dataflow.rules.redis_health import REDIS_RELEASES, RedisHealth
from astraflow_dataflow.rules.waits import Wait
from astraflow_dataflow.store.connection import SLOT_MOVES, Connection, MovedError
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_kit.awake import Silence
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_PERIOD_S, _AGAIN_S, _TIMEOUT_S = 1.0, 0.1, 0.8
"""Between probes, and after one that was not answered: that Redis is silent is known within three seconds."""
_SILENT_S = 2.0
_HOLDS_BACK = (
    "it answers reads and holds back writes, as in a failover or after CLIENT PAUSE (CLIENT UNPAUSE ends it)"
)


class RedisWatch:
    """Knows, without asking, whether the Redis of a run can be used, and what it lacks."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._probes: dict[Connection, Probe] = {}
        self.on_looked: Callable[[], None] = lambda: None
        """Called after each round of probes."""

    def problem(self, run_id: str) -> Wait | None:
        """What the run's Redis lacks now, since when by the server's clock; None when nothing."""
        return self._of(self._redis.home(run_id)).problem

    @property
    def problems(self) -> list[Wait]:
        """What each primary lacks now."""
        return [probe.problem for probe in self._probes.values() if probe.problem]

    def is_silent(self, run_id: str) -> bool:
        """Whether the run's Redis has not answered for two seconds; the registry's for ''."""
        return self._of(self._redis.home(run_id)).is_silent

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            primaries = self._redis.primaries
            self._probes = {primary: self._of(primary) for primary in primaries}
            hangs = await asyncio.gather(*(probe.look() for probe in self._probes.values()))
            self.on_looked()
            await asyncio.sleep(_AGAIN_S if any(hangs) else _PERIOD_S)

    def _of(self, connection: Connection) -> Probe:
        return self._probes.setdefault(connection, Probe(connection))


class Probe:
    """What the probes of one Redis found."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._health = RedisHealth(connection.address)
        self._silence = Silence()
        self._num_answers = 0
        self._has_been_silent = False

    @property
    def problem(self) -> Wait | None:
        """What Redis lacks now, since when by the server's clock; None when nothing."""
        return self._health.problem

    @property
    def is_silent(self) -> bool:
        """Whether Redis has not answered for two seconds."""
        return self._has_been_silent or self._connection.is_silent

    async def look(self) -> bool:
        """Probe once. Returns whether there was no answer."""
        before = self.problem
        hangs = await self._look()
        if (now := self.problem) != before and (now is None or before is None or now.reason != before.reason):
            log.warning(
                "redis.health",
                address=self._connection.address,
                lacks=now.reason if now else "",
                message=now.detail if now else "",
            )
        return hangs

    async def _look(self) -> bool:
        started_s = time.monotonic()
        hangs, refused_as, why = False, "", ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._connection.probe()
        except TimeoutError:
            hangs, why = True, f"probes are not answered within {_TIMEOUT_S:g} s"
        except MovedError:
            pass  # it answers; the cluster looks up who has its slot now
        except AstraflowError as error:
            reason = error.metadata.get("reason", "")
            if reason != SLOT_MOVES:  # it answers, and so does a primary whose own slot is moved
                refused_as, why = reason if reason in REDIS_RELEASES else "", error.message
        latency_s = time.monotonic() - started_s
        figures = await self._figures() if refused_as else {}
        if refused_as or not why:
            self._num_answers += 1
        silent_s = self._silence.look(self._num_answers)
        self._has_been_silent = silent_s >= _SILENT_S
        if self._has_been_silent:
            if hangs:
                self._connection.note_silent()
                why = _HOLDS_BACK if await self._answers_reads() else why
            self._health.silent(silent_s, why, now_s=time.time())
        elif refused_as or not why:
            self._health.answered(latency_s, now_s=time.time(), refused_as=refused_as, figures=figures)
        return hangs

    async def _answers_reads(self) -> bool:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._connection.answers_reads()
        except TimeoutError:
            return False

    async def _figures(self) -> dict[str, str]:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._connection.figures()
        except (TimeoutError, AstraflowError):
            return {}
