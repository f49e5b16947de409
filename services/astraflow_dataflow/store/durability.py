"""Durability: what acknowledgements survive, and how far the disk or a replica has come.

Commits of a run are numbered by Redis. One loop per process and Redis (of a cluster, primary) reads those numbers,
writes a beat after them and waits until the beat is safe: then so is everything before it, which is the watermark sent
to nodes. A number that falls within one data set means that writes were lost, and gives the data set a new identity.
With a level above `memory` acknowledgements wait at `barrier`. Built by `server`; used by ingest, sessions and the
servicers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from astraflow.dataflow.v1 import durability_pb2
from astraflow.errors import (
    AstraflowError,
    IncompatibleError,
    InternalError,
    PreconditionError,
    UnavailableError,
)
from astraflow_dataflow.records import Ability, Beat, Level
from astraflow_dataflow.store.connection import Connection, incarnation, info_fields
from astraflow_dataflow.store.function_library import function_name
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.packs import Payloads
from astraflow_dataflow.store.replies import as_int, as_list, as_mapping, as_text
from astraflow_dataflow.store.writing import Argument
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


async def ability_of(connection: Connection) -> Ability:
    """Return what a Redis can say about what is safe."""
    server, persistence = await connection.info("server"), await connection.info("persistence")
    return Ability(
        name=f"Redis {server['redis_version']} at {connection.address}",
        append_only=persistence.get("aof_enabled") == "1",
        appendfsync=await _setting(connection, "appendfsync"),
        has_waitaof=as_list(await connection.raw("COMMAND", "INFO", "WAITAOF")) not in ([], [None]),
        replicas=int((await connection.info("replication")).get("connected_slaves", "0")),
    )


async def _setting(connection: Connection, name: str) -> str:
    try:
        return as_text(as_mapping(await connection.raw("CONFIG", "GET", name)).get(name, b"unknown"))
    except (InternalError, PreconditionError):
        return "unknown"  # hosted servers often forbid CONFIG


async def beat_of(connection: Connection, run_ids: Sequence[str], *, wait: Sequence[Argument]) -> Beat:
    """Read the position of each run, write a beat, and wait until it is safe with the command `wait` (none: it counts
    as safe once answered). All on one connection, so the positions are those before the beat.
    """
    commands: list[tuple[Argument, ...]] = [("INFO", "server"), ("GET", connection.own_key("incarnation"))]
    commands += [("HGET", Keys(run_id).of("run"), "position") for run_id in run_ids]
    commands.append(("FCALL", function_name("beat"), 1, connection.own_key("beat")))
    commands += [tuple(wait)] if wait else []
    info, data_id, *rest = await connection.raw_many(commands, blocks=True)
    reached = rest[len(run_ids) + 1] if wait else 1
    return Beat(
        incarnation=incarnation(as_text(data_id), info_fields(info)),
        positions=dict(zip(run_ids, map(as_int, rest[: len(run_ids)]), strict=True)),
        is_safe=as_int(reached[0] if isinstance(reached, list) else reached) >= 1,
    )


async def choose_method(connection: Connection, level: Level) -> Method:
    """Return how to learn what is safe. Raises IncompatibleError with the remedy when Redis cannot give the level."""
    ability = await ability_of(connection)
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
    """Marks and barriers of one server process: a `Disk` for each Redis that has runs."""

    def __init__(self, redis: Redis, level: Level, *, payloads: Payloads | None = None) -> None:
        self._redis = redis
        self._payloads = payloads
        self._level = level
        self._disks: dict[Connection, Disk] = {}
        self._homes: dict[str, Disk] = {}
        """Where each run was when it was asked for last."""
        self._following: asyncio.TaskGroup | None = None
        self.on_mark: Callable[[str], None] = lambda _: None
        """Called with a run whose watermark moved."""
        self.on_loss: Callable[[Connection], Awaitable[None]] = _nothing
        """Called with a Redis that turned out to have lost writes."""

    async def start(self) -> None:
        """Choose the methods. Raises IncompatibleError when a Redis cannot give the level."""
        for primary in self._redis.primaries:
            try:
                await self._disk(primary).start()
            except UnavailableError as error:
                if primary is self._redis.home(""):
                    raise
                log.warning("durability.later", address=primary.address, message=error.message)

    def reached(self, run_id: str) -> durability_pb2.Durability.ValueType:
        """What an acknowledgement given now has reached."""
        if self._level is Level.REPLICATED:
            return durability_pb2.DURABILITY_REPLICATED
        is_on_disk = self._level is Level.FSYNCED or self._of(run_id).is_always_safe
        return durability_pb2.DURABILITY_FSYNCED if is_on_disk else durability_pb2.DURABILITY_MEMORY

    def watermark(self, run_id: str) -> durability_pb2.Watermark | None:
        """Return what is safe of a run by now; None while its Redis, or nobody yet, can tell."""
        return self._of(run_id).watermark(run_id)

    def note(self, run_id: str, position: int) -> None:
        """A commit got this position: the watermark has to follow, or, below one seen before, writes may be lost."""
        self._of(run_id).note(run_id, position)

    def forget(self, run_id: str) -> None:
        """The run is gone."""
        if disk := self._homes.pop(run_id, None):
            disk.forget(run_id)

    async def barrier(self, *run_ids: str) -> None:
        """Wait until everything written of these runs before this call has reached the level; '' stands for what is of
        all runs. Raises UnavailableError.
        """
        await asyncio.gather(*(disk.barrier() for disk in {self._of(run_id) for run_id in run_ids}))

    async def run(self) -> None:
        """Follow the disks or the replicas until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._following = group
            for disk in self._disks.values():
                group.create_task(disk.run())

    async def see_payloads(self, incarnation: str) -> None:
        """This is where payloads are now. If it is another place, or began again, what was stored there last may be
        gone: the data sets get new identities, so that nodes push again.
        """
        if self._payloads is not None and await self._payloads.is_another(incarnation):
            log.error("payloads.began_again", remedy="nodes push again what was not durable")
            for disk in self._disks.values():
                disk.doubt()
            for disk in self._disks.values():
                try:
                    await disk.begin_anew()
                except UnavailableError as error:
                    log.warning("durability.later", message=error.message)  # by its loop

    def _of(self, run_id: str) -> Disk:
        """The disk under a run. One that moved is followed there, and no longer where it was."""
        disk = self._disk(self._redis.home(run_id))
        before = self._homes.get(run_id)
        if before is not disk:
            if before is not None:
                before.forget(run_id)
            self._homes[run_id] = disk
        return disk

    def _disk(self, connection: Connection) -> Disk:
        if connection not in self._disks:
            disk = self._disks[connection] = Disk(connection, self._level, self)
            if self._following is not None:
                self._following.create_task(disk.run())
        return self._disks[connection]

    def moved_away(self, connection: Connection, run_ids: Iterable[str]) -> list[str]:
        """Return the runs that are no longer there."""
        return [run_id for run_id in run_ids if self._redis.home(run_id) is not connection]

    @property
    def payload_redis(self) -> Connection | None:
        """The other Redis, if payloads are there: nothing is safe before it is safe there."""
        return self._payloads.redis if self._payloads else None


class Disk:
    """What one Redis says is safe of the runs that it has."""

    def __init__(self, connection: Connection, level: Level, owner: Durability) -> None:
        self._connection = connection
        self._level = level
        self._owner = owner
        self._payload_incarnation = ""
        self._method: Method | None = None
        """None before the Redis was asked."""
        self._payload_method = Method.NONE
        self._marks: dict[str, Mark] = {}
        self._highest: dict[str, int] = {}
        self._incarnation = ""
        self._is_in_doubt = False
        self._wanted = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        """Choose the method. Raises IncompatibleError when the Redis cannot give the level."""
        method = await choose_method(self._connection, self._level)
        if payload_redis := self._owner.payload_redis:
            self._payload_method = await choose_method(payload_redis, self._level)
            self._payload_incarnation = await payload_redis.data_incarnation()
            if self._payload_method is Method.NONE:
                method = Method.NONE
        if method is Method.NONE:
            log.info("durability.unmeasured", remedy="Redis 7.2, Valkey, or appendfsync always")
        self._method = method

    @property
    def is_always_safe(self) -> bool:
        """Whether nothing is answered before a disk has it."""
        return self._method is Method.ALWAYS and (
            self._owner.payload_redis is None or self._payload_method is Method.ALWAYS
        )

    def watermark(self, run_id: str) -> durability_pb2.Watermark | None:
        """Return what is safe of a run by now."""
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
        """A commit got this position."""
        highest = self._highest.get(run_id, 0)
        if position != highest:
            self._highest[run_id] = max(position, highest)
            self._wanted.set()

    def forget(self, run_id: str) -> None:
        """The run is gone from here."""
        self._marks.pop(run_id, None)
        self._highest.pop(run_id, None)

    async def barrier(self) -> None:
        """Wait until everything written before this call has reached the level. Raises UnavailableError."""
        if self._level is Level.MEMORY or self.is_always_safe:
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
            for run_id in self._owner.moved_away(self._connection, [*self._highest]):
                self.forget(run_id)
            if not (waiting or self._highest or self._is_in_doubt):
                continue  # a primary that has no runs any more may be gone
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
        if self._method is None:
            await self.start()
        await self.begin_anew()
        known, method = dict(self._highest), self._method or Method.NONE
        beat = await beat_of(self._connection, list(known), wait=_WAITS[method])
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
        if method is Method.NONE or not (beat.is_safe and await self._payloads_are_safe()):
            return method is Method.NONE
        for run_id, position in positions.items():
            mark = Mark(position=position, incarnation=beat.incarnation)
            if self._marks.get(run_id) != mark:
                self._marks[run_id] = mark
                self._owner.on_mark(run_id)
        return True

    async def _payloads_are_safe(self) -> bool:
        """Whether the payloads of all commits until now are as safe: each was stored before its commit."""
        payload_redis = self._owner.payload_redis
        if payload_redis is None:
            return True
        beat = await beat_of(payload_redis, [], wait=_WAITS[self._payload_method])
        if beat.incarnation == self._payload_incarnation:
            return beat.is_safe
        self._payload_incarnation = beat.incarnation
        self._marks.clear()
        await self._owner.see_payloads(beat.incarnation)
        return False

    def doubt(self) -> None:
        """What was stored last may be gone; nothing is known to be safe."""
        self._is_in_doubt = True
        self._marks.clear()
        self._wanted.set()

    async def begin_anew(self) -> None:
        """Give the data set a new identity where it is in doubt."""
        if not self._is_in_doubt:
            return
        await self._connection.replace_incarnation(await self._connection.data_incarnation())
        self._is_in_doubt = False
        await self._owner.on_loss(self._connection)

    async def _writes_were_lost(self, lost: Sequence[str], beat: Beat) -> None:
        log.error("redis.lost_writes", runs=list(lost), remedy="nodes push again what was not durable")
        await self._connection.replace_incarnation(beat.incarnation)
        self._marks.clear()
        self._highest = dict(beat.positions)
        await self._owner.on_loss(self._connection)


def lost_runs(known: Mapping[str, int], positions: Mapping[str, int]) -> list[str]:
    """Return the runs whose newest position is lower than one that was seen before."""
    return [run_id for run_id, position in known.items() if positions.get(run_id, 0) < position]


_WAITS: Mapping[Method, tuple[str | int, ...]] = {
    Method.ALWAYS: (),
    Method.NONE: (),
    Method.WAITAOF: ("WAITAOF", 1, 0, 5000),
    Method.WAIT: ("WAIT", 1, 5000),
}


async def _nothing(_: Connection) -> None:
    return


def _release(waiting: Sequence[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _fail(waiting: Sequence[asyncio.Future[None]], error: AstraflowError) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(error)
