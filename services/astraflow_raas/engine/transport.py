"""JSON over HTTP to one engine: every way in which a request can fail becomes one of the errors of `base`.

Invariant: a request ends within its deadline even when its answer arrives byte by byte, and only requests that do no
harm twice are repeated. Used by `http` only.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from astraflow.client import RetryPolicy
from astraflow.errors import AstraflowError
from astraflow_kit.awake import within
from astraflow_raas.engine.base import EngineFaulty, EngineHung, EngineRefused, EngineUnavailable
from astraflow_raas.engine.connection_pools import ConnectionPools

_CONNECT_TIMEOUT_S = 5.0
_REPEAT = RetryPolicy(first_wait_s=0.05, max_wait_s=1.0)
_REPEATS = 2
_BUSY = frozenset({408, 429, 502, 503, 504})


class EngineTransport:
    """Requests to the engine at a base URL. Owned by one event loop.

    What an engine does at once (to pause, to resume, to say what it serves) has `control_timeout_s`, repetitions
    included: then it counts as hung.
    """

    def __init__(self, base_url: str, *, control_timeout_s: float, headers: Mapping[str, str]) -> None:
        self.base_url = base_url
        self._control_timeout_s = control_timeout_s
        # The whole request has a deadline; httpx's own would begin anew with every byte.
        self._pools = ConnectionPools(
            base_url,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            headers=headers,
        )
        self._closed = False

    async def close(self) -> None:
        """Close every connection; requests that wait, and all later ones, raise EngineUnavailable."""
        self._closed = True
        await self._pools.close()

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """The answer to a GET, which is repeated when it is lost."""
        return await self._repeated("GET", path, None)

    async def get_once(self, path: str, *, timeout_s: float) -> Any:  # noqa: ANN401 - JSON
        """The answer to a GET, which is sent once."""
        return await self._send("GET", path, None, timeout_s=timeout_s)

    async def post(self, path: str, body: Mapping[str, object], *, timeout_s: float) -> Any:  # noqa: ANN401 - JSON
        """The answer to a POST, which is sent once."""
        return await self._send("POST", path, body, timeout_s=timeout_s)

    async def post_idempotent(self, path: str, body: Mapping[str, object]) -> None:
        """A POST that may arrive twice: repeated when its answer is lost."""
        await self._repeated("POST", path, body)

    async def post_until_acknowledged(self, path: str, body: Mapping[str, object]) -> None:
        """A POST that must arrive: repeated whatever is answered. Raises EngineUnavailable after `control_timeout_s`,
        and when the engine is given up."""
        loop, attempt = asyncio.get_running_loop(), 0
        give_up_s = loop.time() + self._control_timeout_s
        while True:
            attempt += 1
            try:
                await self._send("POST", path, body, timeout_s=max(0.1, give_up_s - loop.time()))
                return
            except AstraflowError as error:
                if self._closed or loop.time() >= give_up_s:
                    raise EngineUnavailable(
                        f"{path} was not acknowledged within {self._control_timeout_s} s "
                        f"({attempt} attempts): {error.message}"
                    ) from error
            await asyncio.sleep(_REPEAT.wait_s(attempt))

    async def _repeated(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:  # noqa: ANN401 - JSON
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._control_timeout_s
        for attempt in range(1, _REPEATS + 1):
            try:
                return await self._send(method, path, body, timeout_s=give_up_s - loop.time())
            except EngineUnavailable:
                if self._closed or loop.time() + _REPEAT.wait_s(attempt) >= give_up_s:
                    raise
            await asyncio.sleep(_REPEAT.wait_s(attempt))
        return await self._send(method, path, body, timeout_s=give_up_s - loop.time())

    async def _send(
        self, method: str, path: str, body: Mapping[str, object] | None, *, timeout_s: float
    ) -> Any:  # noqa: ANN401 - JSON
        where = f"{method} {self.base_url}{path}"
        if self._closed:
            # The engine died: whoever still holds it learns so as from a refused connection.
            raise EngineUnavailable(f"{where}: the engine is gone, its connections are closed")
        try:
            response = await within(self._request(method, path, body), timeout_s)
        except TimeoutError as error:
            raise EngineHung(f"{where}: no whole answer within {timeout_s:.1f} s") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise EngineUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        return _answer(response, where=where)

    async def _request(self, method: str, path: str, body: Mapping[str, object] | None) -> httpx.Response:
        async with self._pools.client() as client:
            return await client.request(method, path, json=body)


def _answer(response: httpx.Response, *, where: str) -> Any:  # noqa: ANN401 - JSON
    problem = f"{where} answered {response.status_code}: {brief(response.text)}"
    if response.status_code in _BUSY:
        raise EngineUnavailable(problem)
    if response.status_code >= 500:
        raise EngineFaulty(problem)
    if response.status_code >= 400:
        raise EngineRefused(problem)
    if "json" not in response.headers.get("content-type", ""):
        return response.text
    try:
        return response.json()
    except ValueError as error:
        raise EngineFaulty(f"{where} answered with broken JSON: {error}") from error


def brief(value: object) -> str:
    """The start of a text, for messages."""
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
