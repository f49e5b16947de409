"""The HTTP routes of the endpoint.

Invariant: a request is read only when its key opens an episode and the episode has a slot for it, so a wrong key costs
nothing; a client that hangs up takes its call along. Routes translate and delegate to `calls`. Made by `endpoint`.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from astraflow.plugins import Policy
from astraflow_kit.http import body_of
from astraflow_raas.agents import answers
from astraflow_raas.agents.api_errors import ApiError, unauthorised
from astraflow_raas.agents.calls import AgentCalls, Answers
from astraflow_raas.agents.requests import ChatRequest, TextRequest, read
from astraflow_raas.agents.responses import ResponseRequest, response, response_events

_MAX_BODY_BYTES = 4 * 2**20
_REFUSAL_DELAY_S = 0.05
"""Before a refusal that a loop could ask for without end."""
IGNORED_HEADER = "x-astraflow-ignored"


def create_agent_app(find: Callable[[str], AgentCalls | None]) -> FastAPI:
    """The app; `find` returns the episode that a key opens."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def opened(request: Request) -> AgentCalls:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        calls = find(key.strip() if kind.lower() == "bearer" else "")
        if calls is None:
            raise unauthorised()
        return calls

    @app.exception_handler(ApiError)
    async def refuse(_request: Request, error: ApiError) -> JSONResponse:
        """Any refusal, after a moment if a flood could consist of it."""
        if error.status in (401, 429):
            await asyncio.sleep(_REFUSAL_DELAY_S)
        return JSONResponse(error.body, status_code=error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        """A route that there is not."""
        what = f"{request.method} {request.url.path}: {error.detail}; docs/agents.md lists the routes"
        return JSONResponse(ApiError(error.status_code, what, code="unknown_url").body, error.status_code)

    @app.get("/v1/models")
    async def list_models(request: Request) -> Mapping[str, object]:
        """The models of the episode."""
        return answers.models(opened(request).policies)

    @app.post("/v1/chat/completions")
    async def complete_chat(request: Request) -> Response:
        """A chat completion, whole or as events."""
        return await _answer(
            opened(request), request, ChatRequest, answers.chat_completion, answers.chat_events
        )

    @app.post("/v1/completions")
    async def complete_text(request: Request) -> Response:
        """A completion of a text, whole or as events."""
        return await _answer(
            opened(request), request, TextRequest, answers.text_completion, answers.text_events
        )

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        """A response, whole or as events."""
        return await _answer(opened(request), request, ResponseRequest, response, response_events)

    return app


RequestT = TypeVar("RequestT", ChatRequest, TextRequest, ResponseRequest)


async def _answer(
    calls: AgentCalls,
    request: Request,
    kind: type[RequestT],
    whole: Callable[[RequestT, Answers, Policy], Mapping[str, object]],
    events: Callable[[RequestT, Answers, Policy], Iterator[str]],
) -> Response:
    async with calls.slot():
        wanted, ignored = read(await _body(request), kind)
        with calls.recorded(request.url.path, request.headers.get("traceparent", "")):
            answered = await _unless_gone(calls.start(wanted.call()), request)
    policy, headers = calls.policies[wanted.model], {IGNORED_HEADER: ", ".join(ignored)}
    if wanted.stream:
        text = "".join(events(wanted, answered, policy))
        return Response(text, media_type="text/event-stream", headers=headers)
    return JSONResponse(whole(wanted, answered, policy), headers=headers)


async def _body(request: Request) -> bytes:
    body = await body_of(request, max_bytes=_MAX_BODY_BYTES)
    if body is None:
        raise ApiError(
            413, f"the body has more than {_MAX_BODY_BYTES} bytes; shorten the messages", code="too_large"
        )
    return body


async def _unless_gone(task: "asyncio.Task[Answers]", request: Request) -> Answers:
    """The answer, unless the client hangs up or the episode ends first."""
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client hung up", code="client_gone")
    finally:
        gone.cancel()
        task.cancel()
    if task.cancelled():
        raise unauthorised()
    return task.result()
