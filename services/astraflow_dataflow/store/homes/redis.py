"""Where a run lives: the one seam between the stores, which name keys of a run, and the Redis that has them.

Alone, a `store.connection.Connection` is all of it; in a cluster, `homes.cluster.Cluster` sends each call to the
primary that has the run's slot. Used by the stores, and by durability and the watch, which follow each primary by
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from astraflow.errors import AstraflowError
    from astraflow_dataflow.store.connection import Call, Connection
    from astraflow_dataflow.store.keys import Keys
    from astraflow_dataflow.store.replies import Reply
    from astraflow_dataflow.store.writing import Argument


class Redis(Protocol):
    """One Redis, or the primaries of a cluster. The run '' stands for the registry of all runs."""

    @property
    def address(self) -> str:
        """Where it is, without credentials."""

    @property
    def primaries(self) -> Sequence[Connection]:
        """Those that have runs now."""

    def home(self, run_id: str) -> Connection:
        """The one that has the run, as far as this process knows."""

    async def open(self) -> None:
        """Check each, and load the functions. Raises UnavailableError, PreconditionError, IncompatibleError with the
        remedy.
        """

    async def close(self) -> None:
        """Close all connections."""

    async def ready(self) -> str | None:
        """None when calls can be made; else the reason as one sentence."""

    async def data_incarnation(self, run_id: str = "") -> str:
        """Return the identity of the data set that the run is in, and of its process."""

    async def now_ms(self, run_id: str = "") -> int:
        """Return the time by the clock that the run goes by."""

    async def call(self, keys: Keys, name: str, *arguments: Argument) -> Reply:
        """Call a function on a run. Raises the typed error it answers."""

    async def call_many(self, keys: Keys, calls: Sequence[Call]) -> list[Reply | AstraflowError]:
        """Send calls on a run in one pipeline: a reply, or typed error, of each."""

    async def transaction(
        self, writes: Sequence[tuple[Argument, ...]], keys: Keys, name: str, *arguments: Argument
    ) -> tuple[list[Reply], Reply | AstraflowError]:
        """Send writes of a run's keys and one call as a transaction; see `Connection.transaction`."""

    async def raw(self, *command: Argument) -> Reply:
        """Send one plain command, whose first argument is a key."""

    async def raw_many(self, commands: Iterable[tuple[Argument, ...]]) -> list[Reply]:
        """Send plain commands on keys of one slot in one pipeline, which is not atomic. Raises the first error."""

    async def read_stream(
        self, key: str, *, after: str, block_ms: int, limit: int
    ) -> list[tuple[str, dict[str, str]]]:
        """Return entries of a stream after an id, waiting for the first. Raises UnavailableError also when the stream
        moved: what the reader knows of its place is no longer so.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
