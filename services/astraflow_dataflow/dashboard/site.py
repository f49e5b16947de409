"""The page for people: its files, its sign-in, and what it asks for.

Invariant: the files tell nothing about any run, so they need no token; all else is answered as the rpcs behind it are,
for the caller that the token names. A token travels in a header or in a cookie that no script reads, never in an
address. Built by `server`, served by the kit's pages.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse

from astraflow.dataflow.v1 import sample_service_pb2
from astraflow.errors import AstraflowError, InvalidArgumentError
from astraflow_dataflow.dashboard.gateway import Gateway, refusal
from astraflow_dataflow.dashboard.samples import Samples
from astraflow_dataflow.episodes.archiving import Archives
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_kit.http import body_of
from astraflow_kit.identity.gate import caller
from astraflow_kit.identity.verifier import Verifier
from astraflow_kit.pages import READERS, token_cookie
from astraflow_kit.rpc_contracts import Registration

BUNDLE = Path(__file__).with_name("static")
"""Made by `make web`; it holds what npm brought, so it is never committed."""
FILES = {"/": "index.html", "/app.js": "app.js", "/app.css": "app.css"}
_MISSING = """<!doctype html><html lang="en"><meta charset="utf-8"><title>AstraFlow</title>
<h1>The dashboard is not built</h1>
<p>This server works; only the files of its page are missing. In the checkout run <code>make web</code> (it needs
<code>npm</code>, or brings it from PyPI), then load this page again.</p>
<p><a href="/status">/status</a> and <a href="/metrics">/metrics</a> have the same figures, and
<code>astraflow status</code>, <code>astraflow why</code> and <code>astraflow samples</code> show them in a
terminal.</p></html>"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 503,
}
_MAX_FORM_BYTES = 16384
_SMALL_BYTES = 1024
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


class Dashboard:
    """The site of a dataflow server; a `Site` of the kit's pages."""

    open_paths = frozenset({*FILES, "/login", "/logout", "/favicon.ico"})

    def __init__(
        self,
        registrations: list[Registration],
        *,
        registry: RunRegistry,
        archives: Archives,
        ending: asyncio.Event,
        bundle: Path = BUNDLE,
    ) -> None:
        """Streams end once `ending` is set."""
        self._gateway = Gateway(registrations)
        self._samples = Samples(self._gateway, registry, archives)
        self._ending = ending
        self._bundle = bundle
        self._process = secrets.token_hex(8)

    def add_to(self, app: FastAPI, verifier: Verifier | None) -> None:
        """Add the page, its sign-in and what it asks for."""
        self._add_files(app)
        self._add_sign_in(app, verifier)
        app.get("/api/session")(self._session)
        app.get("/api/rpc/{service}/{method}")(self._rpc)
        app.get("/api/sample")(self._sample)
        app.get("/api/search")(self._search)
        app.get("/api/export")(self._export)
        app.add_exception_handler(AstraflowError, _refused)
        app.middleware("http")(_protected)

    def _add_files(self, app: FastAPI) -> None:
        def serve(path: str, name: str) -> None:
            @app.get(path, include_in_schema=False)
            async def file(request: Request) -> Response:
                found = self._bundle / name
                if not found.is_file():
                    return HTMLResponse(_MISSING, status_code=200 if path == "/" else 404)
                return await _packed(request, found.read_bytes(), _TYPES[found.suffix])

        for path, name in FILES.items():
            serve(path, name)

        @app.get("/favicon.ico", include_in_schema=False)
        async def icon() -> Response:
            return Response(status_code=204)

    def _add_sign_in(self, app: FastAPI, verifier: Verifier | None) -> None:
        @app.post("/login", include_in_schema=False)
        async def login(request: Request) -> Response:
            """Keep the token of a form in a cookie; a browser is then sent to the page."""
            (token,) = parse_qs((await _body(request)).decode(errors="replace")).get("token", [""])[:1]
            if verifier is not None:
                identity = verifier.identify(f"Bearer {token.strip()}")
                if not identity.roles & READERS:
                    roles = ", ".join(identity.roles)
                    raise InvalidArgumentError(
                        f"that token is for {roles}; the page is for viewers: astraflow token create --role viewer"
                    )
            answer: Response = RedirectResponse("/", status_code=303)
            answer.set_cookie(
                token_cookie(request),
                token.strip(),
                httponly=True,
                samesite="strict",
                secure=request.url.scheme == "https",
            )
            return answer

        @app.post("/logout", include_in_schema=False)
        async def logout(request: Request) -> Response:
            """Forget the token."""
            answer: Response = RedirectResponse("/", status_code=303)
            answer.delete_cookie(token_cookie(request), httponly=True, samesite="strict")
            return answer

    async def _session(self) -> Response:
        """Who reads, and which process answers."""
        identity = caller()
        return JSONResponse(
            {"subject": identity.subject, "roles": sorted(identity.roles), "process": self._process}
        )

    async def _rpc(self, service: str, method: str, http: Request, request: str = "") -> Response:
        rpc = self._gateway.find(service, method)
        message = self._gateway.request(rpc, request)
        if not rpc.streams:
            return await _packed(http, await self._gateway.answer(rpc, message), "application/json")
        hello = json.dumps({"process": self._process})
        events = self._gateway.events(rpc, message, hello=hello, ending=self._ending)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _sample(self, run_id: str, sample_id: str) -> Response:
        return JSONResponse(await self._samples.one(run_id, sample_id))

    async def _search(self, request: str, text: str) -> Response:
        return JSONResponse(await self._samples.search(self._listing(request), text))

    async def _export(
        self,
        request: str,
        format: str,  # noqa: A002 - the name in the address
        text: str = "",
    ) -> Response:
        content, media_type = await self._samples.exported(self._listing(request), format, text=text)
        named = {"Content-Disposition": f'attachment; filename="samples.{format}"'}
        return StreamingResponse(content, media_type=media_type, headers=named)

    def _listing(self, request: str) -> sample_service_pb2.ListSamplesRequest:
        message = self._gateway.request(self._gateway.find("SampleService", "ListSamples"), request)
        return cast("sample_service_pb2.ListSamplesRequest", message)


async def _packed(request: Request, content: bytes, media_type: str) -> Response:
    """An answer, compressed for who takes that: series and scripts shrink to a third."""
    named = {"Vary": "Accept-Encoding"}
    if len(content) > _SMALL_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content = await asyncio.to_thread(gzip.compress, content, 5)
        named["Content-Encoding"] = "gzip"
    return Response(content, media_type=media_type, headers=named)


async def _body(request: Request) -> bytes:
    body = await body_of(request, max_bytes=_MAX_FORM_BYTES)
    if body is None:
        raise InvalidArgumentError(f"the form has more than {_MAX_FORM_BYTES} bytes; it holds a token")
    return body


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, AstraflowError):
        raise error
    return JSONResponse(refusal(error), status_code=_STATUS.get(error.code, 500))


async def _protected(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await answer(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response
