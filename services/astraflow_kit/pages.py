"""The pages of one daemon: who may read them, over TLS or not, and the probe listener beside them.

Invariant: once the daemon has token keys, only the probes answer who has no token of a viewer or an operator for
what the page is about; and no web site reads a page through the browser of somebody who may, by a name of its own for
the daemon's address. Daemons build one `Pages` and run it as a `Service`.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from astraflow.connecting.connection import is_loopback
from astraflow.errors import AstraflowError
from astraflow_kit.http import HttpServer, ReadinessCheck, StatusSource, create_app, create_probes
from astraflow_kit.identity.certificates import ServerCertificate
from astraflow_kit.identity.gate import denied, speaking
from astraflow_kit.identity.tokens import ALL
from astraflow_kit.identity.verifier import RevokedElsewhere, Verifier
from astraflow_kit.lifecycle import Lifecycle
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.settings import DaemonSettings

log = get_logger(__name__)

PROBES = ("/healthz", "/startedz", "/readyz")
READERS = frozenset({"operator", "viewer"})
_STATUS = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}


class Site(Protocol):
    """Pages of a daemon's own beside /status and /metrics."""

    @property
    def open_paths(self) -> frozenset[str]:
        """What answers without a token: it tells nothing that is not the same for everybody."""

    def add_to(self, app: FastAPI, verifier: Verifier | None) -> None:
        """Add the pages; `verifier` decides about tokens, None where the daemon has no keys."""


def token_cookie(request: Request) -> str:
    """Name of the cookie in which a browser keeps its token: cookies are of a host, whatever the port."""
    return f"astraflow_token_{request.url.port or 'default'}"


class Pages:
    """Serves /status, /metrics and the probes on `http_port`, the probes alone on `probe_port` where that is set."""

    def __init__(
        self,
        settings: DaemonSettings,
        *,
        life: Lifecycle,
        metrics: Metrics,
        status: StatusSource,
        readiness: Mapping[str, ReadinessCheck] | None = None,
        run_id: str = "",
        revoked: RevokedElsewhere = frozenset,
        site: Site | None = None,
    ) -> None:
        """`run_id` is the run that all pages are about; without one /status shows those runs that the caller may see,
        and /metrics is for who may see all. Raises SettingsError for keys or certificates that cannot be used.
        """
        started = life.started.is_set
        app = create_app(metrics=metrics, status=status, readiness=readiness, started=started)
        verifier = Verifier(settings, revoked=revoked) if settings.token_keys_file else None
        if verifier is not None:
            open_paths = site.open_paths if site else frozenset()
            _require_tokens(app, verifier, run_id=run_id, open_paths=open_paths.union(PROBES))
        if site is not None:
            site.add_to(app, verifier)
        named = (settings.http_host, *settings.http_allowed_hosts)
        _require_known_host(app, frozenset({"localhost", *map(str.lower, named)}))
        tls = ServerCertificate(settings).ssl_context() if settings.tls_cert_file else None
        self._settings = settings
        self._pages = HttpServer(app, host=settings.http_host, port=settings.http_port, tls=tls)
        self._servers = [self._pages]
        self._probes: HttpServer | None = None
        if settings.probe_port is not None:
            probes = create_probes(readiness=readiness, started=started)
            host, port = settings.probe_host, settings.probe_port
            self._probes = HttpServer(probes, host=host, port=port, setting="probe_port")
            self._servers.append(self._probes)

    @property
    def address(self) -> str:
        """`host:port` of the pages, known after `start`."""
        return self._pages.address

    @property
    def probe_address(self) -> str:
        """The same of the probe listener; empty without one."""
        return self._probes.address if self._probes else ""

    async def start(self) -> None:
        """Bind. Raises PortError."""
        for server in self._servers:
            await server.start()
        if self._settings.insecure_http and not is_loopback(self._settings.http_host):
            log.warning(
                "pages.exposed", address=self.address, gives_up="whoever reaches it may read these pages"
            )

    async def run(self) -> None:
        """Serve until `stop`."""
        await asyncio.gather(*(server.run() for server in self._servers))

    async def stop(self, *, deadline_s: float) -> None:
        """Let open requests finish for at most `deadline_s`."""
        for server in self._servers:
            await server.stop(deadline_s=deadline_s)


def _require_tokens(app: FastAPI, verifier: Verifier, *, run_id: str, open_paths: frozenset[str]) -> None:
    @app.middleware("http")
    async def admit(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.url.path
        if path in open_paths:
            return await answer(request)
        try:
            kept = request.cookies.get(token_cookie(request))
            identity = verifier.identify(
                request.headers.get("authorization", f"Bearer {kept}" if kept else None)
            )
            if not identity.roles & READERS:
                raise denied(
                    "role",
                    f"{identity.subject!r} has role {', '.join(identity.roles)}; pages are for viewers",
                )
            whole = run_id or (ALL if path == "/metrics" else "")
            if whole and not identity.may_see(whole):
                about = f"run {run_id!r}" if run_id else "all runs"
                raise denied(
                    "run", f"{path} is about {about}, which the token of {identity.subject!r} is not for"
                )
        except AstraflowError as error:
            refused = {"error": error.reason, "message": error.message, **error.metadata}
            headers = {"WWW-Authenticate": "Bearer"} if error.reason == "UNAUTHENTICATED" else None
            return JSONResponse(refused, status_code=_STATUS[error.reason], headers=headers)
        with speaking(identity):
            return await answer(request)


def _require_known_host(app: FastAPI, allowed: frozenset[str]) -> None:
    """Starlette's own check knows no IPv6 address, would need every address of the machine, and has no remedy."""

    @app.middleware("http")
    async def admit_host(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        host = _host_of(request.headers.get("host", ""))
        if request.url.path in PROBES or "*" in allowed or host in allowed or _is_address(host):
            return await answer(request)
        return PlainTextResponse(
            f"this daemon does not go by the name {host[:64]!r}; ask for it by its address or as localhost, or name it "
            "with --http-allowed-host (http_allowed_hosts)\n",
            status_code=421,
        )


def _host_of(header: str) -> str:
    """The name or address in a Host header, without its port; empty for none, or for what is no host."""
    try:
        return (urlsplit(f"//{header}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    """A page of a site that goes by an address comes from that address: no other answers for it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
