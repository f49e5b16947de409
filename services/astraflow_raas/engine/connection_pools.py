"""HTTP connections to one engine, kept in many small pools.

Invariant: a request never waits for a connection, and what it costs does not grow with the number of others: httpx
looks at every connection of a pool for every request, which took 9 ms of CPU per request among 128 and takes 1.4 ms
in pools of four. Used by `http` only.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx

POOL_CONNECTIONS = 4
_KEEPALIVE_S = 2.0
"""Well below the 5 s after which SGLang closes an idle connection: a request on one that it closes just then is lost.
"""


class ConnectionPools:
    """Small httpx clients of one base URL, made as they are needed. Owned by one event loop."""

    def __init__(
        self, base_url: str, *, timeout: httpx.Timeout, headers: Mapping[str, str] | None = None
    ) -> None:
        self._base_url = base_url
        self._headers = headers
        self._timeout = timeout
        self._limits = httpx.Limits(
            max_connections=POOL_CONNECTIONS,
            max_keepalive_connections=POOL_CONNECTIONS,
            keepalive_expiry=_KEEPALIVE_S,
        )
        # One context for all: reading the certificates takes 20 ms, and plain HTTP needs none.
        self._verify = httpx.create_ssl_context() if base_url.startswith("https://") else False
        self._clients: list[httpx.AsyncClient] = []
        self._in_use: list[int] = []

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client with a free connection, for one request."""
        index = self._free_pool()
        self._in_use[index] += 1
        try:
            yield self._clients[index]
        finally:
            self._in_use[index] -= 1

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients:
            await client.aclose()

    def _free_pool(self) -> int:
        # The first ones first, so that connections beyond the usual need fall idle and are closed.
        for index, in_use in enumerate(self._in_use):
            if in_use < POOL_CONNECTIONS:
                return index
        client = httpx.AsyncClient(
            base_url=self._base_url,
            headers=self._headers,
            limits=self._limits,
            timeout=self._timeout,
            verify=self._verify,
            # A proxy meant for the internet must never see loopback traffic.
            trust_env=False,
        )
        self._clients.append(client)
        self._in_use.append(0)
        return len(self._clients) - 1
