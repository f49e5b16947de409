"""The one adapter over a Redis, alone or a primary of a cluster: connection, checks, errors and replies.

Only the room `store` imports redis, and every state change goes through a function of the library, so what must be
atomic is atomic whatever process asks. A Redis that would lose data silently (eviction, no append-only file, wrong
schema) is refused at start with the remedy. Alone it is where all runs live (`homes.redis.Redis`); of primaries
`homes.cluster` has one each. Used by all domain modules through `Store`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Self, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from redis import asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.credentials import CredentialProvider

from astraflow import errors
from astraflow._contract.bounds import MAX_INTEGER
from astraflow_dataflow.store import function_library
from astraflow_dataflow.store.keys import READ_AS_IT_IS, SCHEMA_VERSION, Keys, own_key
from astraflow_dataflow.store.replies import Reply, as_int, as_list, as_mapping, as_text
from astraflow_dataflow.store.writing import Argument, writing
from astraflow_kit.log import get_logger
from astraflow_kit.releases import refuse
from astraflow_kit.settings import read_secret

log = get_logger(__name__)

MIN_REDIS_VERSION = (7, 0)
_DEADLINE_S = 8.0
"""Below the deadline of a client's call, which then hears who is silent."""
_BLOCKING_DEADLINE_S = 10.0
"""Of what waits for the disk, or for a replica."""
_MOST_AT_ONCE = 64
"""Commands in flight, besides blocking ones; each has a connection."""
_ASK_AGAIN_S = 0.2
SILENT = "redis_silent"
"""What `reason` says, in the metadata of errors, of a Redis that takes connections and does not answer."""
SLOT_MOVES = "redis_slot_moves"
"""The same, while the slot of a run is moved key by key."""

Call: TypeAlias = tuple[str, tuple[Argument, ...]]

_REFUSALS: Mapping[str, type[errors.AstraflowError]] = {
    "FENCED": errors.FencedError,
    "HELD": errors.PolicyHeldError,
    "CONFLICT": errors.ConflictError,
    "GAP": errors.VersionGapError,
    "NOTFOUND": errors.NotFoundError,
    "INVALID": errors.InvalidArgumentError,
    "PRECONDITION": errors.PreconditionError,
    "DEFECT": errors.InternalError,
    "LOST": errors.UnavailableError,
}
_METADATA = re.compile(r"\[(\w+)=([^\]]*)\] ")


_REFUSED_USER = (
    redis_errors.AuthenticationError,
    redis_errors.AuthorizationError,
    redis_errors.NoPermissionError,
)


class MovedError(errors.UnavailableError):
    """The slot of a key is another node's by now: the command changed nothing, and belongs there."""

    def __init__(self, slot: int, address: str) -> None:
        super().__init__(f"slot {slot} is at {address} now; repeat the call", retry_after_s=0.2)
        self.slot = slot
        self.address = address
        """`HOST:PORT`."""


class Connection:
    """A connection pool to one Redis with the library loaded. A primary of a cluster has a `tag`, which hashes to one
    of its slots.
    """

    def __init__(
        self, url: str, *, password_file: Path | None = None, allow_volatile: bool = False, tag: str = ""
    ) -> None:
        self._shown = without_credentials(url)
        self._allow_volatile = allow_volatile
        self.tag = tag
        # No socket_timeout: redis-py then sends through asyncio.wait_for, which in Python 3.11 loses cancellations.
        # `_answered` bounds every command instead.
        self._redis = redis_asyncio.Redis.from_url(
            self._shown if password_file else url,
            credential_provider=PasswordFile(url, password_file) if password_file else None,
            socket_timeout=None,
            socket_connect_timeout=5.0,
            health_check_interval=15,
            protocol=2,
            max_connections=2**31,
        )
        self._redis.connection_pool.connection_class = writing(self._redis.connection_pool.connection_class)
        # redis-py refuses commands beyond its bound of connections; these wait, and blocking reads are one per run.
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        # The same pool without redis-py's own parsers: replies arrive as RESP arrays and bytes.
        self._plain = redis_asyncio.Redis(connection_pool=self._redis.connection_pool)
        self._plain.response_callbacks.clear()
        self._asking: asyncio.Task[None] | None = None
        """Asks a silent Redis until it answers; nobody else does meanwhile."""

    async def open(self) -> None:
        """Check the server, claim or compare the schema, load the functions.

        Raises UnavailableError when Redis does not answer, PreconditionError when it refuses this user, and
        IncompatibleError with the remedy when it must not be used.
        """
        try:
            await self._check_server()
            await self._check_schema()
            await self.load_functions()
        except errors.UnavailableError as error:
            await self.close()
            raise errors.UnavailableError(
                f"no usable Redis at {self._shown}: {error.message}; start one, or give another --redis"
            ) from error
        except errors.AstraflowError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all connections."""
        if self._asking is not None:
            self._asking.cancel()
        await self._redis.aclose()

    @property
    def address(self) -> str:
        """Where Redis is, without credentials."""
        return self._shown

    @property
    def primaries(self) -> Sequence[Connection]:
        """This one: it has all slots."""
        return (self,)

    def home(self, run_id: str) -> Connection:
        """This one: all runs live here."""
        return self

    def own_key(self, name: str) -> str:
        """Name of a key that this Redis keeps of itself."""
        return own_key(name, self.tag)

    async def probe(self) -> None:
        """Write in a way that changes nothing, also to a silent Redis. Raises the typed error, whose metadata has what
        Redis lacks as `reason`; the caller bounds the time.
        """
        try:
            await self._plain.execute_command("SET", self.own_key("schema"), SCHEMA_VERSION, "NX")
        except redis_errors.RedisError as error:
            raise translate(error) from error

    async def answers_reads(self) -> bool:
        """Whether a silent Redis answers what changes nothing; the caller bounds the time."""
        try:
            await self._plain.execute_command("PING")
        except redis_errors.RedisError:
            return False
        return True

    async def figures(self) -> dict[str, str]:
        """Return what INFO says of memory, persistence and replication."""
        sections = [await self.info(name) for name in ("memory", "persistence", "replication")]
        return {name: value for section in sections for name, value in section.items()}

    def note_silent(self) -> None:
        """Redis does not answer: calls fail at once until it does."""
        if not self.is_silent:
            self._asking = asyncio.create_task(self._ask_until_it_answers(), name="silent Redis")

    @property
    def is_silent(self) -> bool:
        """Whether a command had no answer in time, and Redis has given none since."""
        return self._asking is not None and not self._asking.done()

    async def load_functions(self) -> None:
        """Load the library, replacing what has its name. What is there already is left: a full Redis loads nothing,
        and must not keep the server from making room.
        """
        source = function_library.source()
        found = await self.raw("FUNCTION", "LIST", "LIBRARYNAME", function_library.LIBRARY, "WITHCODE")
        codes = [as_mapping(entry).get("library_code") for entry in as_list(found)]
        if source.encode() not in codes:
            await self.raw("FUNCTION", "LOAD", "REPLACE", source)

    async def data_incarnation(self, run_id: str = "") -> str:
        """Return the identity of the data set that a run is in; a restarted Redis may have lost its last second, so it
        counts as another.
        """
        key = self.own_key("incarnation")
        data_id = as_text(await self.raw("GET", key))
        if not data_id:
            await self.raw("SET", key, secrets.token_hex(8), "NX")
            data_id = as_text(await self.raw("GET", key))
        return incarnation(data_id, await self.info("server"))

    async def now_ms(self, run_id: str = "") -> int:
        """Return the time by Redis' clock."""
        seconds, microseconds = map(as_int, as_list(await self.raw("TIME")))
        return seconds * 1000 + microseconds // 1000

    async def replace_incarnation(self, seen: str) -> None:
        """Give the data set another identity, unless it no longer has the one that was seen."""
        if await self.data_incarnation() == seen:
            await self.raw("SET", self.own_key("incarnation"), secrets.token_hex(8))

    async def ready(self) -> str | None:
        """None when Redis answers and holds the functions; else the reason as one sentence."""
        try:
            found = await self.raw("FUNCTION", "LIST", "LIBRARYNAME", function_library.LIBRARY)
        except errors.AstraflowError as error:
            return f"Redis at {self._shown} does not answer: {error.message}"
        lost = f"Redis lost the function library {function_library.LIBRARY}; restart this server"
        return None if found else lost

    async def call(self, keys: Keys, name: str, *arguments: Argument) -> Reply:
        """Call a function of the library on one run. Raises the typed error it answers."""
        (reply,) = await self.call_many(keys, [(name, arguments)])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def call_many(self, keys: Keys, calls: Sequence[Call]) -> list[Reply | errors.AstraflowError]:
        """Send calls in one pipeline: a reply, or typed error, of each. Raises UnavailableError when Redis is away."""
        replies = await self._pipeline(keys, calls)
        if any(_function_is_missing(reply) for reply in replies):
            await self.load_functions()
            replies = await self._pipeline(keys, calls)
        return [_typed(reply) for reply in replies]

    async def transaction(
        self, writes: Sequence[tuple[Argument, ...]], keys: Keys, name: str, *arguments: Argument
    ) -> tuple[list[Reply], Reply | errors.AstraflowError]:
        """Send writes and one call as a transaction. Returns what the writes answer, and the call's reply or typed
        error, None when Redis had lost the functions: call again.
        """
        async with self._answered(), self._redis.pipeline(transaction=True) as pipeline:
            for command in (*writes, _function_call(keys, name, arguments)):
                pipeline.execute_command(*command)
            *written, reply = await pipeline.execute(raise_on_error=False)
        if _function_is_missing(reply):
            await self.load_functions()
            return written, None
        return written, _typed(reply)

    async def raw(self, *command: Argument) -> Reply:
        """Send one plain command. Raises the typed error."""
        async with self._answered():
            return cast("Reply", await self._plain.execute_command(*command))
        raise AssertionError("an answered command returned or raised")

    async def raw_many(
        self, commands: Iterable[tuple[Argument, ...]], *, blocks: bool = False
    ) -> list[Reply]:
        """Send plain commands in one pipeline on one connection, which is not atomic; one reply each. Raises the first
        typed error.
        """
        deadline_s = _BLOCKING_DEADLINE_S if blocks else _DEADLINE_S
        async with (
            self._answered(deadline_s, blocks=blocks),
            self._plain.pipeline(transaction=False) as pipeline,
        ):
            for command in commands:
                pipeline.execute_command(*command)
            return cast("list[Reply]", await pipeline.execute())
        raise AssertionError("an answered pipeline returned or raised")

    async def read_stream(
        self, key: str, *, after: str, block_ms: int, limit: int
    ) -> list[tuple[str, dict[str, str]]]:
        """Return up to `limit` entries of a stream after an id, waiting up to `block_ms` for the first."""
        command = ("XREAD", "COUNT", limit, "BLOCK", block_ms, "STREAMS", key, after)
        async with self._answered(_DEADLINE_S + block_ms / 1000, blocks=True):
            reply = await self._plain.execute_command(*command)
        entries = as_list(as_list(as_list(reply)[0])[1]) if reply else []
        return [
            (as_text(entry), {name: as_text(value) for name, value in as_mapping(fields).items()})
            for entry, fields in map(as_list, entries)
        ]

    async def _pipeline(self, keys: Keys, calls: Sequence[Call]) -> list[object]:
        async with self._answered(), self._redis.pipeline(transaction=False) as pipeline:
            for name, arguments in calls:
                pipeline.execute_command(*_function_call(keys, name, arguments))
            return list(await pipeline.execute(raise_on_error=False))
        raise AssertionError("an answered pipeline returned or raised")

    @asynccontextmanager
    async def _answered(
        self, deadline_s: float = _DEADLINE_S, *, blocks: bool = False
    ) -> AsyncIterator[None]:
        """Bound what is inside by a deadline and raise its failures as typed errors; at once while Redis is silent.
        What `blocks` on purpose takes nobody's turn.
        """
        if self.is_silent:
            raise self._silent()
        try:
            async with asyncio.timeout(deadline_s), nullcontext() if blocks else self._turns:
                yield
        except TimeoutError as error:
            self.note_silent()
            raise self._silent() from error
        except redis_errors.RedisError as error:
            raise translate(error) from error

    def _silent(self) -> errors.UnavailableError:
        return errors.UnavailableError(
            f"Redis at {self._shown} gave no answer for seconds; it is asked until it does",
            metadata={"reason": SILENT},
            retry_after_s=0.2,
        )

    async def _ask_until_it_answers(self) -> None:
        log.warning("redis.silent", address=self._shown)
        while True:
            if await self._answers_a_write():
                log.info("redis.answers", address=self._shown)
                return
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _answers_a_write(self) -> bool:
        """Whether a probe is answered, if only by refusing it; a Redis that holds back writes answers reads."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await self.probe()
        except TimeoutError:
            return False
        except errors.AstraflowError as error:
            return "reason" in error.metadata
        return True

    async def _check_server(self) -> None:
        server, figures = await self.info("server"), await self.info("memory") | await self.info("cluster")
        is_kept = (await self.info("persistence")).get("aof_enabled") == "1"
        _require_usable(
            self._shown,
            server,
            figures,
            keeps=is_kept or self._allow_volatile,
            in_cluster=bool(self.tag),
        )

    async def info(self, section: str) -> dict[str, str]:
        """Return a section of INFO."""
        return info_fields(await self.raw("INFO", section))

    async def _check_schema(self) -> None:
        stored = as_int(await self.raw("GET", self.own_key("schema")))
        if not stored:
            await self.raw("SET", self.own_key("schema"), SCHEMA_VERSION, "NX")
            stored = as_int(await self.raw("GET", self.own_key("schema")))
        if stored in READ_AS_IT_IS:
            await self.raw("SET", self.own_key("schema"), SCHEMA_VERSION)
            log.info("redis.taken_over", address=self._shown, schema_version=stored, now=SCHEMA_VERSION)
        elif stored != SCHEMA_VERSION:
            raise refuse(
                f"the data in Redis at {self._shown}",
                format_="redis",
                found=stored,
                reads=[*READ_AS_IT_IS, SCHEMA_VERSION],
                otherwise="give another Redis database and start a new run",
            )

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _require_usable(
    shown: str, server: Mapping[str, str], figures: Mapping[str, str], *, keeps: bool, in_cluster: bool
) -> None:
    """Raise IncompatibleError, with the remedy, for a Redis that is too old or would lose acknowledged data."""
    version = server["redis_version"]
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS_VERSION:
        raise errors.IncompatibleError(
            f"Redis {version} at {shown} is too old; install 7.0 or newer, or Valkey (functions)"
        )
    policy = figures.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise errors.IncompatibleError(
            f"Redis at {shown} evicts keys (maxmemory-policy {policy}), which would lose acknowledged data; set "
            "maxmemory-policy noeviction"
        )
    if figures.get("cluster_enabled") == "1" and not in_cluster:
        raise errors.IncompatibleError(
            f"Redis at {shown} is a node of a cluster, and is asked for as one that is alone; give the addresses of "
            "some of its nodes as redis+cluster://HOST:PORT,HOST:PORT"
        )
    if not keeps:
        raise errors.IncompatibleError(
            f"Redis at {shown} keeps no append-only file, so a restart would lose acknowledged data; set appendonly "
            "yes, or accept the loss with --allow-volatile"
        )


def translate(error: Exception) -> errors.AstraflowError:
    """Return the typed error for what redis-py raised or a function answered."""
    if isinstance(error, _REFUSED_USER):  # before ConnectionError, which redis-py derives some of these from
        return errors.PreconditionError(
            f"Redis refuses this user: {error}; give redis://USER@HOST:PORT/DB of one who may run all commands, "
            "and the password in --redis-password-file"
        )
    if (elsewhere := _of_a_cluster(error)) is not None:
        return elsewhere
    if isinstance(error, redis_errors.ReadOnlyError):
        return errors.UnavailableError(
            f"Redis is a read-only replica: {error}; give the address of its primary",
            retry_after_s=0.2,
            metadata={"reason": "redis_read_only"},
        )
    if isinstance(error, redis_errors.ConnectionError | redis_errors.TimeoutError):
        return errors.UnavailableError(f"Redis does not answer: {error}", retry_after_s=0.2)
    if isinstance(error, redis_errors.OutOfMemoryError) or "OOM" in str(error)[:16]:
        return errors.ResourceExhaustedError(
            "Redis is full (maxmemory); let trainers consume, mark steps durable, or give it more memory",
            retry_after_s=1.0,
            metadata={"reason": "redis_full"},
        )
    kind, _, text = str(error).partition(" ")
    if kind == "MISCONF":
        return errors.UnavailableError(
            f"Redis cannot write its files: {text}; free its disk or fix its folder's mode",
            retry_after_s=1.0,
            metadata={"reason": "redis_disk_full"},
        )
    if kind == "NOREPLICAS":
        return errors.UnavailableError(
            f"Redis refuses writes: {text}; bring its replicas back, or lower min-replicas-to-write",
            retry_after_s=1.0,
            metadata={"reason": "redis_read_only"},
        )
    refusal = _REFUSALS.get(kind)
    if refusal is not None:
        named = _METADATA.match(text)
        return refusal(text[named.end() :], metadata={named[1]: named[2]}) if named else refusal(text)
    return errors.InternalError(f"Redis answered an error: {error}")


def _of_a_cluster(error: Exception) -> errors.AstraflowError | None:
    """The typed error for what only nodes of a cluster say."""
    if isinstance(error, redis_errors.MovedError):
        return MovedError(error.slot_id, f"{error.host}:{error.port}")
    if isinstance(error, redis_errors.AskError | redis_errors.TryAgainError):
        # A function would find a part of its run's keys on either node, so nobody is asked until all are on one.
        return errors.UnavailableError(
            f"the run's slot is being moved key by key ({error}); its calls wait until that has ended",
            retry_after_s=0.2,
            metadata={"reason": SLOT_MOVES},
        )
    if isinstance(error, redis_errors.ClusterDownError):
        return errors.UnavailableError(
            f"the Redis cluster refuses: {error}; bring its missing primaries back, and set "
            "cluster-require-full-coverage no so that it serves what it has",
            retry_after_s=0.2,
            metadata={"reason": "redis_cluster_down"},
        )
    if str(error).startswith("UNBLOCKED"):
        return errors.UnavailableError(f"Redis became a replica: {error}", retry_after_s=0.2)
    return None


def _typed(reply: object) -> Reply | errors.AstraflowError:
    if isinstance(reply, Exception):
        return translate(reply)
    return cast("Reply", reply)


def _function_call(keys: Keys, name: str, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    for value in arguments:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise errors.InvalidArgumentError(
                f"{name}: {value} is beyond {MAX_INTEGER}, the largest integer kept"
            )
    return "FCALL", function_library.function_name(name), 1, keys.prefix, *arguments


def _function_is_missing(reply: object) -> bool:
    return isinstance(reply, redis_errors.ResponseError) and "Function not found" in str(reply)


def info_fields(reply: Reply) -> dict[str, str]:
    """Return the fields of what INFO, or CLUSTER INFO, answered."""
    return dict(line.split(":", 1) for line in as_text(reply).splitlines() if ":" in line)


def incarnation(data_id: str, server: Mapping[str, str]) -> str:
    """Return the identity of a data set in a process; `server` is that section of INFO."""
    return f"{data_id}.{server.get('run_id', '')[:12]}"


class PasswordFile(CredentialProvider):
    """The user of an address and the password in a file, read at every new connection so that it can be rotated."""

    def __init__(self, url: str, path: Path) -> None:
        self._user = unquote(urlsplit(url).username or "")
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User, if the address names one, and password. Raises SettingsError for a file that cannot be read."""
        password = read_secret(self._path)
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same; the file is small and local."""
        return self.get_credentials()


def without_credentials(url: str) -> str:
    """The address alone."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
