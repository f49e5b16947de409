"""Payloads in the server's own Redis: written with the call that refers to them, in one transaction.

Invariant: what a key holds is never overwritten, and what was written for a call that failed ends by itself. Called by
the store of episodes.
"""

from collections.abc import Mapping
from typing import TypeAlias

from astraflow.errors import AstraflowError
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import Reply
from astraflow_dataflow.store.writing import Argument

UNCOMMITTED_S = 3600
"""Life of a payload whose commit failed, or never came."""
_Command: TypeAlias = "tuple[Argument, ...]"


async def call_with(
    connection: Redis,
    keys: Keys,
    payloads: Mapping[str, bytes],
    name: str,
    *arguments: Argument,
    some_exist: bool = False,
) -> tuple[Reply, bool]:
    """Write payloads by key and call a function, together. Where one key exists no payload is written, unless
    `some_exist`.

    Returns the reply, and whether all payloads were written. Raises the typed error.
    """
    writes: list[_Command] = [("MSETNX", *(part for item in payloads.items() for part in item))]
    if some_exist:
        writes = [("SET", key, body, "NX") for key, body in payloads.items()]
    written, reply = await connection.transaction(writes, keys, name, *arguments)
    fresh = [*payloads] if written[0] == 1 else []
    if some_exist:
        fresh = [key for key, said in zip(payloads, written, strict=True) if said]
    if reply is not None and not isinstance(reply, AstraflowError):
        return reply, len(fresh) == len(payloads)
    await connection.raw_many([("EXPIRE", key, UNCOMMITTED_S) for key in fresh])
    if reply is not None:
        raise reply
    return await call_with(connection, keys, payloads, name, *arguments, some_exist=True)
