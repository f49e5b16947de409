"""Tokens that are refused although they have not expired, in Redis for all servers over it.

Invariant: what one server acknowledged, every server of that Redis refuses within 2 s; a Redis that does not answer
takes nothing back. Written by the admin service; `server` asks it for each call, and keeps it up to date.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import AstraflowError, ResourceExhaustedError
from astraflow_dataflow.store.keys import REVOKED_TOKENS_KEY
from astraflow_dataflow.store.replies import as_int, as_list, as_text, as_texts
from astraflow_kit.identity.tokens import LEEWAY_S
from astraflow_kit.log import get_logger

if TYPE_CHECKING:
    from astraflow_dataflow.store.homes.redis import Redis

log = get_logger(__name__)

MAX_REVOKED = 10_000
_LOOK_EVERY_S = 1.5


class RevokedTokens:
    """The revoked tokens as Redis has them, and as this server last saw them."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection
        self._seen: frozenset[str] = frozenset()

    def seen(self) -> frozenset[str]:
        """Ids as of the last look, at most 1.5 s ago while Redis answers."""
        return self._seen

    async def revoke(self, token_id: str, *, expires_s: float = math.inf) -> bool:
        """Keep the token revoked until it expires (seconds since 1970); True when it was revoked before.

        Raises ResourceExhaustedError at `MAX_REVOKED` tokens.
        """
        await self._connection.raw(
            "ZREMRANGEBYSCORE", REVOKED_TOKENS_KEY, "-inf", f"({await self._oldest_s()}"
        )
        if as_int(await self._connection.raw("ZCARD", REVOKED_TOKENS_KEY)) >= MAX_REVOKED:
            raise ResourceExhaustedError(
                f"{MAX_REVOKED} tokens are revoked already; replace the key that signed them in token_keys_file"
            )
        added = as_int(await self._connection.raw("ZADD", REVOKED_TOKENS_KEY, "GT", expires_s, token_id))
        await self.look()
        return added == 0

    async def all(self) -> list[pb.RevokedToken]:
        """Every token that is revoked and has not expired, by id."""
        return sorted(await self._read(), key=lambda token: token.token_id)

    async def look(self) -> None:
        """See what Redis has now, those too that expired meanwhile: they are refused as expired."""
        self._seen = frozenset(as_texts(await self._connection.raw("ZRANGE", REVOKED_TOKENS_KEY, 0, -1)))

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self.look()
            except AstraflowError as error:
                log.warning("revoked_tokens.not_read", reason=error.reason, message=error.message)

    async def _read(self) -> list[pb.RevokedToken]:
        since = await self._oldest_s()
        flat = as_list(
            await self._connection.raw("ZRANGE", REVOKED_TOKENS_KEY, since, "+inf", "BYSCORE", "WITHSCORES")
        )
        return [
            _token(as_text(token_id), float(as_text(score)))
            for token_id, score in zip(flat[::2], flat[1::2], strict=True)
        ]

    async def _oldest_s(self) -> float:
        """Tokens that expired before this moment are refused as expired anyway."""
        return await self._connection.now_ms() / 1000 - LEEWAY_S


def _token(token_id: str, expires_s: float) -> pb.RevokedToken:
    token = pb.RevokedToken(token_id=token_id)
    if math.isfinite(expires_s):
        token.expire_time.FromNanoseconds(int(expires_s * 1e9))
    return token
