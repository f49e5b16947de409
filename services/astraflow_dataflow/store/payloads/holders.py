"""The two places outside that can hold packs of payloads: another Redis, and an object store.

A holder knows names and bytes, nothing of runs' states: what is needed and what may go is decided by the functions of
`store/lua/payloads.lua`. Made from the settings by `holder_of`, used by `store.payloads.packs`.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_bytes
from astraflow_weights.errors import ObjectNotFound
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectStore, open_store

T = TypeVar("T")

_THREADS = 16
_IDENTITY = "astraflow-payloads/identity"


class PayloadHolder(Protocol):
    """Packs by run and name. Every call may be repeated, and raises UnavailableError while the place is away."""

    @property
    def address(self) -> str:
        """Where it is, without secrets."""

    @property
    def redis(self) -> Connection | None:
        """The Redis that it is, which says what is on its disk; None where all that was stored is."""

    async def open(self) -> None:
        """Check that it can be used. Raises UnavailableError, IncompatibleError, PreconditionError with the remedy."""

    async def close(self) -> None:
        """Let go of it."""

    async def put(self, run_id: str, pack: str, body: bytes) -> None:
        """Store a pack, once."""

    async def get(self, run_id: str, pack: str, *, start: int, length: int) -> bytes | None:
        """Return bytes [start, start + length) of a pack; None when they are not there."""

    async def delete(self, run_id: str, packs: Sequence[str]) -> None:
        """Remove packs; one that is not there is success."""

    async def incarnation(self) -> str:
        """Return its identity; another one means that what was stored last may be lost."""


class RedisHolder:
    """Packs as keys of another Redis."""

    def __init__(self, connection: Connection) -> None:
        self.redis: Connection = connection

    @property
    def address(self) -> str:
        """Where it is, without secrets."""
        return self.redis.address

    async def open(self) -> None:
        """Check the Redis; of the functions only the beat is called there."""
        await self.redis.open()

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.close()

    async def put(self, run_id: str, pack: str, body: bytes) -> None:
        """Store a pack."""
        await self.redis.raw("SET", _key(run_id, pack), body)

    async def get(self, run_id: str, pack: str, *, start: int, length: int) -> bytes | None:
        """Return a part of a pack."""
        found = as_bytes(await self.redis.raw("GETRANGE", _key(run_id, pack), start, start + length - 1))
        return found if len(found) == length else None

    async def delete(self, run_id: str, packs: Sequence[str]) -> None:
        """Remove packs."""
        await self.redis.raw("UNLINK", *(_key(run_id, pack) for pack in packs))

    async def incarnation(self) -> str:
        """Return the data set's identity, and the process'."""
        return await self.redis.data_incarnation()


class ObjectHolder:
    """Packs as objects."""

    redis = None

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="payloads")

    @property
    def address(self) -> str:
        """Root of the store."""
        return self._store.uri

    async def open(self) -> None:
        """Create the identity, or read it."""
        await self.incarnation()

    async def close(self) -> None:
        """Wait for nothing that is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def put(self, run_id: str, pack: str, body: bytes) -> None:
        """Store a pack. Its name is random: whatever has it is this one, of a call whose answer was lost."""
        await self._in_thread(lambda: self._store.put_if_absent(_object(run_id, pack), body))

    async def get(self, run_id: str, pack: str, *, start: int, length: int) -> bytes | None:
        """Return a part of a pack."""
        name = _object(run_id, pack)
        try:
            found = await self._in_thread(lambda: self._store.get_range(name, start=start, length=length))
        except ObjectNotFound:
            return None
        return found if len(found) == length else None

    async def delete(self, run_id: str, packs: Sequence[str]) -> None:
        """Remove packs."""
        await asyncio.gather(*(self._delete(_object(run_id, pack)) for pack in packs))

    async def incarnation(self) -> str:
        """Return the identity that is kept in the store."""
        await self._in_thread(lambda: self._store.put_if_absent(_IDENTITY, secrets.token_bytes(8)))
        return (await self._in_thread(lambda: self._store.get(_IDENTITY))).hex()

    async def _delete(self, name: str) -> None:
        await self._in_thread(lambda: self._store.delete(name))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def holder_of(
    address: str | None,
    *,
    password_file: Path | None = None,
    allow_volatile: bool = False,
    store: StoreSettings | None = None,
) -> PayloadHolder | None:
    """Return the holder at an address, not open yet; None for none."""
    if address is None:
        return None
    if address.partition(":")[0] in ("s3", "file"):
        return ObjectHolder(open_store(address, settings=store))
    return RedisHolder(Connection(address, password_file=password_file, allow_volatile=allow_volatile))


def _key(run_id: str, pack: str) -> str:
    return Keys(run_id).of("pack", pack)


def _object(run_id: str, pack: str) -> str:
    return f"{run_id}/payloads/{pack}"
