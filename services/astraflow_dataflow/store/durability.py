"""Durability: what acknowledgements survive, and how far the disk or a replica has come.

Commits of a run are numbered by Redis. One loop per process reads those numbers, writes a beat after them and waits
until the beat is safe: then so is everything before it, which is the watermark sent to nodes. A number that falls
within one data set means that writes were lost, and gives the data set a new identity. With a level above `memory`
acknowledgements wait at `barrier`. Built by `server`; used by ingest, sessions and the servicers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from astraflow.dataflow.v1 import durability_pb2
from astraflow.errors import AstraflowError, IncompatibleError, UnavailableError
from astraflow_dataflow.records import Beat, Level
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.payloads.packs import Payloads
from astraflow_kit.log import get_logger

log = get_logger(__name__)

BARRIER_S = 30.0
_PAUSE_S = 0.05
_UNMEASURED_PAUSE_S = 1.0
_RETRY_S = 0.2


class Method(Enum):
    """How this Redis shows what is safe."""

    ALWAYS = "appendfsync always"
    """It answers only after the disk has it."""
    WAITAOF = "WAITAOF"
    WAIT = "WAIT"
    NONE = "none"
    """It cannot tell: no watermark."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Everything of a run up to `position` is safe, within the data set `incarnation`."""

    position: int
    incarnation: str


async def choose_method(connection: Connection, level: Level) -> Method:
    """Return how to learn what is safe. Raises IncompatibleError with the remedy when Redis cannot give the level."""
    ability = await connection.durability()
    if level is Level.REPLICATED:
        if ability.replicas < 1:
            raise IncompatibleError(
                f"{ability.name} has no connected replica, so nothing can be acknowledged as replicated; attach a "
                "replica, or choose --durability fsynced"
            )
        return Method.WAIT
    if ability.append_only and ability.appendfsync == "always":
        return Method.ALWAYS
    if ability.append_only and ability.has_waitaof and ability.appendfsync != "no":
        return Method.WAITAOF
    if level is Level.FSYNCED:
        raise IncompatibleError(
            f"{ability.name} cannot say what is on its disk (appendonly {'yes' if ability.append_only else 'no'}, "
            f"appendfsync {ability.appendfsync}, {'with' if ability.has_waitaof else 'without'} WAITAOF); set "
            "appendonly yes and appendfsync always, or use Redis 7.2 or Valkey with appendfsync everysec, or choose "
            "--durability memory"
        )
    return Method.NONE


class Durability:
    """Marks and barriers of one server process."""

    def __init__(self, connection: Connection, level: Level, *, payloads: Payloads | None = None) -> None:
        self._connection = connection
        self._payloads = payloads
        """Where they are on another Redis, nothing is safe before it is safe there."""
        self._payload_incarnation = ""
        self._level = level
        self._method = self._payload_method = Method.NONE
        self._marks: dict[str, Mark] = {}
        self._highest: dict[str, int] = {}
        self._incarnation = ""
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self.on_mark: Callable[[str], None] = lambda _: None
        """Called with a run whose watermark moved."""
        self.on_loss: Callable[[], Awaitable[None]] = _nothing
        """Called when Redis turns out to have lost writes."""

    async def start(self) -> None:
        """Choose the method. Raises IncompatibleError when Redis cannot give the level."""
        self._method = await choose_method(self._connection, self._level)
        if self._payload_redis is not None:
            self._payload_method = await choose_method(self._payload_redis, self._level)
            self._payload_incarnation = await self._payload_redis.data_incarnation()
            if self._payload_method is Method.NONE:
                self._method = Method.NONE
        if self._method is Method.NONE:
            log.info("durability.unmeasured", remedy="Redis 7.2, Valkey, or appendfsync always")

    @property
    def reached(self) -> durability_pb2.Durability.ValueType:
        """What an acknowledgement given now has reached."""
        if self._level is Level.REPLICATED:
            return durability_pb2.DURABILITY_REPLICATED
        is_on_disk = self._level is Level.FSYNCED or self._always
        return durability_pb2.DURABILITY_FSYNCED if is_on_disk else durability_pb2.DURABILITY_MEMORY

    @property
    def _always(self) -> bool:
        """Whether nothing is answered before a disk has it."""
        return self._method is Method.ALWAYS and (
            self._payload_redis is None or self._payload_method is Method.ALWAYS
        )

    @property
    def _payload_redis(self) -> Connection | None:
        return self._payloads.redis if self._payloads else None

    def watermark(self, run_id: str) -> durability_pb2.Watermark | None:
        """Return what is safe of a run by now; None while this Redis, or nobody yet, can tell."""
        mark = self._marks.get(run_id)
        if mark is None:
            return None
        is_replica = self._method is Method.WAIT
        return durability_pb2.Watermark(
            durable_position=mark.position,
            durability=durability_pb2.DURABILITY_REPLICATED
            if is_replica
            else durability_pb2.DURABILITY_FSYNCED,
            data_incarnation=mark.incarnation,
        )

    def note(self, run_id: str, position: int) -> None:
        """A commit got this position: the watermark has to follow, or, below one seen before, writes may be lost."""
        highest = self._highest.get(run_id, 0)
        if position != highest:
            self._highest[run_id] = max(position, highest)
            self._wanted.set()

    def forget(self, run_id: str) -> None:
        """The run is gone."""
        self._marks.pop(run_id, None)
        self._highest.pop(run_id, None)

    async def barrier(self) -> None:
        """Wait until everything written before this call has reached the level. Raises UnavailableError."""
        if self._level is Level.MEMORY or self._always:
            return
        safe: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(safe)
        self._wanted.set()
        try:
            async with asyncio.timeout(BARRIER_S):
                await safe
        except TimeoutError as error:
            raise UnavailableError(
                f"the write was not {self._level.value} within {BARRIER_S:g} s; repeat the call, and see to the disk "
                "or the replica of Redis",
                retry_after_s=1.0,
            ) from error

    async def run(self) -> None:
        """Follow the disk or the replica until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            try:
                is_safe = await self._step()
            except AstraflowError as error:
                _fail(waiting, error)
                await asyncio.sleep(_RETRY_S)
                self._wanted.set()
                continue
            if not is_safe:
                self._waiting = [*(future for future in waiting if not future.done()), *self._waiting]
                self._wanted.set()
            else:
                _release(waiting)
            await asyncio.sleep(_UNMEASURED_PAUSE_S if self._method is Method.NONE else _PAUSE_S)

    async def _step(self) -> bool:
        """One beat. Returns whether what was written before it is safe."""
        known = dict(self._highest)
        beat = await self._connection.beat(list(known), wait=_WAITS[self._method])
        # A run that was deleted meanwhile is forgotten: another one may get its name.
        positions = {name: number for name, number in beat.positions.items() if name in self._highest}
        if beat.incarnation != self._incarnation:
            if self._incarnation:
                # Another process or data set: its numbers say nothing about those known from before.
                self._highest.clear()
            self._incarnation = beat.incarnation
        elif lost := lost_runs({name: known[name] for name in positions}, positions):
            await self._writes_were_lost(lost, beat)
            return False
        for run_id, position in positions.items():
            self._highest[run_id] = max(position, self._highest.get(run_id, 0))
        if self._method is Method.NONE or not (beat.is_safe and await self._payloads_are_safe()):
            return self._method is Method.NONE
        for run_id, position in positions.items():
            mark = Mark(position=position, incarnation=beat.incarnation)
            if self._marks.get(run_id) != mark:
                self._marks[run_id] = mark
                self.on_mark(run_id)
        return True

    async def _payloads_are_safe(self) -> bool:
        """Whether the payloads of all commits until now are as safe: each was stored before its commit."""
        if self._payloads is None or self._payload_redis is None:
            return True
        beat = await self._payload_redis.beat([], wait=_WAITS[self._payload_method])
        if beat.incarnation == self._payload_incarnation:
            return beat.is_safe
        self._payload_incarnation = beat.incarnation
        self._marks.clear()
        await self.see_payloads(beat.incarnation)
        return False

    async def see_payloads(self, incarnation: str) -> None:
        """This is where payloads are now. If it is another place, or began again, what was stored there last may be
        gone: the data set gets a new identity, so that nodes push again.
        """
        if self._payloads is not None and await self._payloads.is_another(incarnation):
            log.error("payloads.began_again", remedy="nodes push again what was not durable")
            self._marks.clear()
            await self._connection.replace_incarnation(await self._connection.data_incarnation())
            await self.on_loss()

    async def _writes_were_lost(self, lost: Sequence[str], beat: Beat) -> None:
        log.error("redis.lost_writes", runs=list(lost), remedy="nodes push again what was not durable")
        await self._connection.replace_incarnation(beat.incarnation)
        self._marks.clear()
        self._highest = dict(beat.positions)
        await self.on_loss()


def lost_runs(known: Mapping[str, int], positions: Mapping[str, int]) -> list[str]:
    """Return the runs whose newest position is lower than one that was seen before."""
    return [run_id for run_id, position in known.items() if positions.get(run_id, 0) < position]


_WAITS: Mapping[Method, tuple[str | int, ...]] = {
    Method.ALWAYS: (),
    Method.NONE: (),
    Method.WAITAOF: ("WAITAOF", 1, 0, 5000),
    Method.WAIT: ("WAIT", 1, 5000),
}


async def _nothing() -> None:
    return


def _release(waiting: Sequence[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _fail(waiting: Sequence[asyncio.Future[None]], error: AstraflowError) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(error)
