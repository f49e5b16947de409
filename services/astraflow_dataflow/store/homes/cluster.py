"""A Redis Cluster: all keys of a run are in one hash slot, so each run lives on one primary, and calls go there.

Each primary is a `Connection` of its own, with its deadlines, functions, schema and identity. MOVED is followed, for a
command that got it changed nothing. ASK is not: a function reads keys that it does not name, and while a slot is moved
key by key it would find a part of them on either node. What calls name is a prefix and no key, so the node that lets a
slot go answers each with ASK before it runs, and they wait; moved atomically (Valkey 9, Redis 8.4), a slot makes nobody
wait. redis-py's own cluster client follows ASK. Called by the server and the store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from astraflow.errors import AstraflowError, IncompatibleError, UnavailableError
from astraflow_dataflow.store.connection import Call, Connection, MovedError, without_credentials
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.homes.slots import NUM_SLOTS, SlotMap, slot_of
from astraflow_dataflow.store.keys import RUNS_KEY, Keys
from astraflow_dataflow.store.replies import Reply
from astraflow_dataflow.store.writing import Argument
from astraflow_kit.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 5.0
_LOOK_AGAIN_S = 0.5
"""Least time between two looks at the map while a primary is away."""
_PATIENCE_S = 2.0
"""How long a node is waited for that is asked for its map."""
_MOST_MOVES = 20
_PAUSE_S = 0.1
_ADDRESS = re.compile(r"(?P<scheme>rediss?)\+cluster://(?P<user>(?:.*@)?)(?P<nodes>[^/?]+)(?P<rest>.*)")


def redis_at(url: str, *, password_file: Path | None = None, allow_volatile: bool = False) -> Redis:
    """Return the Redis at an address, not open yet: a cluster for `redis+cluster://` and `rediss+cluster://`."""
    connect = partial(Connection, password_file=password_file, allow_volatile=allow_volatile)
    if _ADDRESS.fullmatch(url):
        return Cluster(url, connect)
    return connect(url)


class Cluster:
    """The primaries of a cluster, one `connect` each. The address names some nodes; one of them answers at start."""

    def __init__(self, url: str, connect: Callable[..., Connection]) -> None:
        self._shown = without_credentials(url)
        self._named = _ADDRESS.fullmatch(url)
        self._connect = connect
        self._slots = SlotMap(0, ("",) * NUM_SLOTS)
        self._connections: dict[str, Connection] = {}
        self._usable: set[Connection] = set()
        """Those that were checked and have the functions."""
        self._looking = asyncio.Lock()
        self._num_looks = 0
        self._doubt = asyncio.Event()
        """A primary does not answer: another one may have its slots."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """The nodes that were named, without credentials."""
        return self._shown

    @property
    def primaries(self) -> Sequence[Connection]:
        """Those that have slots now."""
        return [*self._connections.values()]

    def home(self, run_id: str) -> Connection:
        """The primary of the run's slot; of '', of the registry's."""
        return self._of(Keys(run_id).prefix if run_id else RUNS_KEY)

    def _of(self, key: str) -> Connection:
        return self._connections[self._slots.owners[slot_of(key)]]

    async def open(self) -> None:
        """Learn the map and check every primary. One that is away keeps only the runs that it has from being served.
        Raises UnavailableError without any, or without that of the registry, and IncompatibleError for a node of no
        cluster, and for slots that nobody has.
        """
        try:
            found = await self._map_of_named()
            if bare := found.uncovered():
                raise IncompatibleError(
                    f"nobody has the slots {bare} of the Redis cluster at {self._shown}; give them to a primary "
                    "(CLUSTER ADDSLOTSRANGE, or valkey-cli --cluster fix), or bring the one that has them back"
                )
            self._take(found)
            opened = await asyncio.gather(*map(self._require_open, self.primaries), return_exceptions=True)
            for primary, problem in zip(self.primaries, opened, strict=True):
                if isinstance(problem, UnavailableError) and primary is not self.home(""):
                    log.warning("redis.primary_away", address=primary.address, message=problem.message)
                elif problem is not None:
                    raise problem
        except AstraflowError:
            await self.close()
            raise
        self._tasks.add(asyncio.create_task(self._follow(), name="slots"))

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(primary.close() for primary in self.primaries))

    async def ready(self) -> str | None:
        """None when some primary can be used: the server goes on for its runs."""
        problems = await asyncio.gather(*(primary.ready() for primary in self.primaries))
        return None if None in problems else problems[0]

    async def data_incarnation(self, run_id: str = "") -> str:
        """Return the identity of the data set on the run's primary, and of its process."""
        return await self._routed(Keys(run_id).prefix if run_id else RUNS_KEY, Connection.data_incarnation)

    async def now_ms(self, run_id: str = "") -> int:
        """Return the time by the clock of the run's primary."""
        return await self._routed(Keys(run_id).prefix if run_id else RUNS_KEY, Connection.now_ms)

    async def call(self, keys: Keys, name: str, *arguments: Argument) -> Reply:
        """Call a function on a run."""
        return await self._routed(keys.prefix, lambda home: home.call(keys, name, *arguments))

    async def call_many(self, keys: Keys, calls: Sequence[Call]) -> list[Reply | AstraflowError]:
        """Send calls on a run in one pipeline; those after which its slot moved are sent again to where it is."""
        replies: list[Reply | AstraflowError] = [None] * len(calls)
        left = list(range(len(calls)))

        async def ask(home: Connection) -> None:
            for place, reply in zip(left, await home.call_many(keys, [calls[i] for i in left]), strict=True):
                replies[place] = reply
            left[:] = [place for place in left if isinstance(replies[place], MovedError)]
            if left and isinstance(moved := replies[left[0]], MovedError):
                raise moved

        await self._routed(keys.prefix, ask)
        return replies

    async def transaction(
        self, writes: Sequence[tuple[Argument, ...]], keys: Keys, name: str, *arguments: Argument
    ) -> tuple[list[Reply], Reply | AstraflowError]:
        """Send writes of a run's keys and one call as a transaction: a node that lets the slot go refuses it whole."""
        return await self._routed(keys.prefix, lambda home: home.transaction(writes, keys, name, *arguments))

    async def raw(self, *command: Argument) -> Reply:
        """Send one plain command, whose first argument is a key."""
        return await self._routed(str(command[1]), lambda home: home.raw(*command))

    async def raw_many(self, commands: Iterable[tuple[Argument, ...]]) -> list[Reply]:
        """Send plain commands on keys of one slot in one pipeline."""
        listed = list(commands)
        if not listed:
            return []
        return await self._routed(str(listed[0][1]), lambda home: home.raw_many(listed))

    async def read_stream(
        self, key: str, *, after: str, block_ms: int, limit: int
    ) -> list[tuple[str, dict[str, str]]]:
        """Return entries of a stream after an id. Raises UnavailableError, with the map as it is now, when it moved."""
        looks = self._num_looks

        async def ask(home: Connection) -> list[tuple[str, dict[str, str]]]:
            try:
                return await home.read_stream(key, after=after, block_ms=block_ms, limit=limit)
            except MovedError as moved:
                await self._look(looks)
                raise UnavailableError(f"{moved.message}; what waited there looks again") from moved

        return await self._routed(key, ask)

    async def _routed(self, key: str, ask: Callable[[Connection], Awaitable[T]]) -> T:
        """What the primary of the key's slot answers, wherever that moves meanwhile. Raises UnavailableError."""
        for attempt in range(_MOST_MOVES):
            looks, home = self._num_looks, self._of(key)
            try:
                await self._require_open(home)
                return await ask(home)
            except MovedError as moved:
                await asyncio.sleep(_PAUSE_S if attempt else 0)
                await self._look(looks)
                if self._of(key) is home:  # not every node knows of it yet
                    self._believe(moved)
            except UnavailableError:
                self._doubt.set()
                raise
        raise UnavailableError(
            f"the nodes of the cluster at {self._shown} do not agree on who has slot {slot_of(key)}; repeat the call",
            retry_after_s=0.5,
        )

    def _believe(self, moved: MovedError) -> None:
        """Go by what the one says that let the slot go; a primary that is not known yet is waited for."""
        if moved.address in self._connections:
            owners = [*self._slots.owners]
            owners[moved.slot] = moved.address
            self._slots = SlotMap(self._slots.epoch, tuple(owners))

    async def _require_open(self, primary: Connection) -> None:
        if primary not in self._usable:
            await primary.open()
            self._usable.add(primary)

    async def _follow(self) -> None:
        """Look at the map now and then, and soon when a primary does not answer, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._doubt.wait()
            except TimeoutError:
                pass
            self._doubt.clear()
            try:
                await self._look(self._num_looks)
            except AstraflowError as error:
                log.warning("redis.cluster_away", message=error.message)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _look(self, looks: int) -> None:
        """Learn the newest map that a node has, unless somebody has since that many looks. Raises UnavailableError."""
        async with self._looking:
            if self._num_looks != looks:
                return
            found = [each for each in await self._maps() if isinstance(each, SlotMap)]
            newest = max(found, key=lambda each: each.epoch) if found else await self._map_of_named()
            self._take(newest.over(self._slots.owners))

    async def _maps(self) -> list[SlotMap | BaseException]:
        """What each primary answers, or why it does not."""

        async def ask(address: str, primary: Connection) -> SlotMap:
            async with asyncio.timeout(_PATIENCE_S):
                return await _map_from(primary, address)

        asking = (ask(address, primary) for address, primary in self._connections.items())
        return await asyncio.gather(*asking, return_exceptions=True)

    async def _map_of_named(self) -> SlotMap:
        """The map of the first of the named nodes that answers. Raises UnavailableError, and IncompatibleError for one
        of no cluster.
        """
        assert self._named is not None, "built by redis_at"
        why = ""
        for address in self._named["nodes"].split(","):
            node = self._connection(address)
            try:
                return await _map_from(node, address)
            except UnavailableError as error:
                why = error.message
            finally:
                await node.close()
        raise UnavailableError(
            f"no usable node of a Redis cluster at {self._shown}: {why}; start one, or give others (--redis)"
        )

    def _take(self, slots: SlotMap) -> None:
        """Go by this map. One that has no slots any more is let go: calls under way there are made again."""
        for address in slots.addresses:
            if address not in self._connections:
                self._connections[address] = self._connection(address)
            self._connections[address].tag = slots.tag_of(address)
        if slots.owners != self._slots.owners:
            log.info("redis.slots", primaries=slots.addresses, epoch=slots.epoch)
        self._slots = slots
        self._num_looks += 1
        for address in {*self._connections} - {*slots.addresses}:
            gone = self._connections.pop(address)
            self._usable.discard(gone)
            closing = asyncio.create_task(gone.close(), name="closing")
            self._tasks.add(closing)
            closing.add_done_callback(self._tasks.discard)

    def _connection(self, address: str) -> Connection:
        assert self._named is not None, "built by redis_at"
        host, _, port = address.rpartition(":")
        bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
        where = f"{self._named['scheme']}://{self._named['user']}{bracketed}:{port}{self._named['rest']}"
        return self._connect(where, tag="?")

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _map_from(node: Connection, address: str) -> SlotMap:
    if (await node.info("cluster")).get("cluster_enabled") != "1":
        raise IncompatibleError(
            f"Redis at {node.address} is no node of a cluster; give its address as redis://HOST:PORT/DB"
        )
    info, slots = await node.raw_many([("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")])
    host = address.rpartition(":")[0]
    return SlotMap.read(info, slots, asked=host)
