"""The pages for people and probes over FastAPI: /status, /metrics, /healthz, /startedz and /readyz.

Invariant: daemons never talk to each other through these pages, and a probe always gets an answer: each
readiness check has a deadline and a name. `pages` puts them together for a daemon.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from astraflow_kit.log import without_secrets
from astraflow_kit.metrics import CONTENT_TYPE, Metrics
from astraflow_kit.ports import bind_failure

ReadinessCheck = Callable[[], Awaitable[str | None]]
"""Returns None when ready, else the reason and remedy as one sentence."""
StatusSource = Callable[[], Awaitable[Mapping[str, object]]]

CHECK_DEADLINE_S = 2.0
_BACKLOG = 128


def create_app(
    *,
    metrics: Metrics,
    status: StatusSource,
    readiness: Mapping[str, ReadinessCheck] | None = None,
    started: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """The pages; a daemon may add routers of its own. `status` returns what /status shows as JSON."""
    app = create_probes(readiness=readiness, started=started)

    @app.get("/metrics")
    async def render_metrics() -> Response:
        """Prometheus text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/status")
    async def show_status() -> Mapping[str, object]:
        """What the daemon is doing now."""
        return await status()

    return app


def create_probes(
    *, readiness: Mapping[str, ReadinessCheck] | None = None, started: Callable[[], bool]
) -> FastAPI:
    """What orchestrators ask: /healthz, /startedz and /readyz. They tell nothing that is not for everybody."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    checks = dict(readiness or {})

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        """The process answers; says nothing about what it depends on."""
        return PlainTextResponse("ok\n")

    @app.get("/startedz")
    async def startedz() -> PlainTextResponse:
        """Whether every part of the daemon has started; 503 until then. It never fails again."""
        return PlainTextResponse("ok\n") if started() else PlainTextResponse("starting\n", status_code=503)

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """Whether the daemon can do its work, check by check; 503 when one fails."""
        reasons = dict(zip(checks, await asyncio.gather(*map(_reason, checks.values())), strict=True))
        ready = not any(reasons.values())
        rows = [
            {"name": name, "ready": not reason, "reason": without_secrets(reason or "")}
            for name, reason in reasons.items()
        ]
        return JSONResponse({"ready": ready, "checks": rows}, status_code=200 if ready else 503)

    return app


async def body_of(request: Request, *, max_bytes: int) -> bytes | None:
    """The body of a request; None for a longer one, of which no more is kept. No route may read one otherwise: what
    FastAPI or Starlette read by themselves has no end.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            return None
    return bytes(body)


class TimedProtocol(H11Protocol):
    """A connection that is closed unless each request, header and body, arrives in time; uvicorn itself waits."""

    timeout_s: ClassVar[float] = 20.0
    _timer: asyncio.TimerHandle | None = None
    _arrived: object = None
    """The newest request that is here whole."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request."""
        if self._timer is None:
            self._wait()
        super().data_received(data)
        if self.cycle is not self._arrived and not self.cycle.more_body:
            self._arrived = self.cycle
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes any more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.timeout_s, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpServer:
    """Serves an app on one address without touching the process's signal handlers; a lifecycle `Service`."""

    def __init__(
        self,
        app: FastAPI,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        setting: str = "http_port",
        keep_alive_s: int = 5,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`keep_alive_s` is how long an idle connection stays open; a pooling client needs longer. `setting` is where
        the port comes from, for the error of a taken one.
        """
        self._host = host
        self._port = port
        self._setting = setting
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=TimedProtocol,
            lifespan="off",
            ws="none",
            timeout_keep_alive=keep_alive_s,
            ssl_context_factory=(lambda *_: tls) if tls else None,
        )
        self._server = _Uvicorn(config)
        self._socket: socket.socket | None = None
        self.address = ""
        """`host:port`, known after `start`."""

    async def start(self) -> None:
        """Bind; connections queue until `run`. Raises PortError."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._socket = socket.create_server((self._host, self._port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise bind_failure(self._host, self._port, setting=self._setting) from error
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    async def run(self) -> None:
        """Serve until `stop`."""
        if self._socket is None:
            raise RuntimeError("start the server before running it")
        await self._server.serve(sockets=[self._socket])

    async def stop(self, *, deadline_s: float) -> None:
        """Let open requests finish for at most `deadline_s`; `run` returns afterwards."""
        self._server.config.timeout_graceful_shutdown = max(1, int(deadline_s))
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Uvicorn that leaves signals to the lifecycle, which drains all services together."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _reason(check: ReadinessCheck) -> str | None:
    try:
        return await asyncio.wait_for(check(), CHECK_DEADLINE_S)
    except TimeoutError:
        return f"no answer within {CHECK_DEADLINE_S} s"
    except Exception as error:  # noqa: BLE001 - a broken check is an answer: not ready, and why
        return f"{type(error).__name__}: {error}"
