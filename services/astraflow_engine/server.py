"""The HTTP surface: SGLang's paths, bodies, status codes and error shapes over one `EngineService`.

Invariant: an error becomes a status code here and nowhere else, in one of SGLang's three shapes, and never
shows a traceback. Built by `assembly`; rollout nodes call it over loopback.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hmac import compare_digest
from http import HTTPStatus
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.errors import AstraflowError, DeadlineError, RequestError, RetryableError
from astraflow_engine import api
from astraflow_engine.core import CoreStats
from astraflow_engine.errors import InvalidRequest
from astraflow_engine.model_config import ModelConfig
from astraflow_engine.service import EngineService
from astraflow_kit.http import body_of
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import CONTENT_TYPE, Metrics

log = get_logger(__name__)

_MAX_BODY_BYTES = 64 * 1024 * 1024
# The first kind that fits decides.
_STATUS: tuple[tuple[type[AstraflowError], int], ...] = (
    (DeadlineError, 504),
    (RetryableError, 503),
    (RequestError, 400),
    (AstraflowError, 500),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the information paths say about the model, beside its current weights."""

    config: ModelConfig
    limits: api.ModelLimits
    settings: Mapping[str, object]


def create_app(service: EngineService, *, model: ServedModel, metrics: Metrics, api_key: str = "") -> FastAPI:
    """The whole surface. Handlers are thin: parse, ask the service, render. With `api_key`, only /health needs none."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if api_key:
        app.add_middleware(_RequireKey, api_key=api_key)
    _add_errors(app)
    _add_generation(app, service, model=model)
    _add_control(app, service)
    _add_adapters(app, service)
    _add_information(app, service, model=model)
    _add_load(app, service, model=model, metrics=metrics)
    return app


def _add_generation(app: FastAPI, service: EngineService, *, model: ServedModel) -> None:
    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        batch = api.parse_generate(await _body(request), limits=model.limits, new_rid=lambda: uuid4().hex)
        completions = await service.generate(batch.requests, caller_is_gone=_disconnect(request))
        if completions is None:
            return Response(status_code=499)  # nobody reads it
        answers = [
            api.render_completion(completion, with_logprobs=wanted)
            for completion, wanted in zip(completions, batch.return_logprob, strict=True)
        ]
        return _json(answers[0] if batch.single else answers)

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        await service.abort(api.parse_abort(await _body(request)))
        return Response()


def _add_control(app: FastAPI, service: EngineService) -> None:
    @app.post("/pause_generation")
    async def pause_generation(request: Request) -> Response:
        await service.pause(api.parse_pause(await _body(request)))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def continue_generation(request: Request) -> Response:
        await service.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    @app.post("/prepare_weights")
    async def prepare_weights(request: Request) -> Response:
        try:
            await service.prepare_weights(api.parse_update(await _body(request)))
        except AstraflowError as error:
            return _refused_weights(error)
        return _json({"success": True, "message": "Weights are ready for the update."})

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> Response:
        try:
            update = api.parse_update(await _body(request))
            num_live = await service.update_weights(update)
        except AstraflowError as error:
            return _refused_weights(error)
        message = f"Weights loaded from {update.model_path}; weight version is {update.weight_version}."
        return _json({"success": True, "message": message, "num_paused_requests": num_live})

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(timeout: float = 0.0) -> Response:
        try:
            await service.flush(timeout_s=min(max(timeout, 0.0), 60.0))
        except RequestError as error:
            return Response(f"{error.message}\n", status_code=400, media_type="text/plain")
        return Response("Cache flushed.\n", media_type="text/plain")


def _add_adapters(app: FastAPI, service: EngineService) -> None:
    @app.post("/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        try:
            loaded = await service.load_adapter(api.parse_adapter_load(await _body(request)))
        except AstraflowError as error:
            return _refused_adapter(error)
        return _json({"success": True, "error_message": None, "loaded_adapters": loaded})

    @app.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        try:
            loaded = await service.unload_adapter(api.parse_adapter_unload(await _body(request)))
        except AstraflowError as error:
            return _refused_adapter(error)
        return _json({"success": True, "error_message": None, "loaded_adapters": loaded})


def _refused_adapter(error: AstraflowError) -> Response:
    log.warning("adapter.refused", reason=error.reason, message=error.message)
    failure = {"success": False, "error_message": error.message, "loaded_adapters": None}
    return _json(failure, status_code=_status(error))


def _refused_weights(error: AstraflowError) -> Response:
    log.warning("weights.refused", reason=error.reason, message=error.message)
    failure = {"success": False, "message": error.message, "num_paused_requests": 0}
    return _json(failure, status_code=_status(error))


def _add_information(app: FastAPI, service: EngineService, *, model: ServedModel) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.alive else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        if service.alive:
            await service.prove_generating()
        return Response(status_code=200 if service.alive else 503)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        stats = await service.stats()
        return _json(
            {
                "model_path": str(service.model_path),
                "served_model_name": str(service.model_path),
                "tokenizer_path": None,
                "is_generation": True,
                "weight_version": stats.weight_version,
                "load_format": "safetensors",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": model.config.model_type,
                "architectures": [model.config.architecture],
            }
        )

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        stats = await service.stats()
        state = asdict(stats) | {
            "last_gen_throughput": stats.tokens_per_s,
            "effective_max_running_requests_per_dp": stats.num_slots,
        }
        limits = {
            "max_req_input_len": model.limits.context_length - 1,
            "max_total_num_tokens": model.limits.context_length * stats.num_slots,
        }
        return _json({**model.settings, **limits, "engine": "astraflow", "internal_states": [state]})


def _add_load(app: FastAPI, service: EngineService, *, model: ServedModel, metrics: Metrics) -> None:
    @app.get("/v1/loads")
    async def loads() -> Response:
        return _json({"loads": [_load(await service.stats(), limits=model.limits)]})

    @app.get("/metrics")
    async def render_metrics() -> Response:
        _publish(await service.stats(), metrics=metrics)
        return Response(metrics.render(), media_type=CONTENT_TYPE)


def _load(stats: CoreStats, *, limits: api.ModelLimits) -> dict[str, object]:
    capacity = limits.context_length * stats.num_slots
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_used_tokens": stats.num_used_tokens,
        "max_total_num_tokens": capacity,
        "max_running_requests": stats.num_slots,
        "token_usage": round(stats.num_used_tokens / capacity, 4),
        "gen_throughput": round(stats.tokens_per_s, 2),
    }


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(AstraflowError)
    async def refused(request: Request, error: AstraflowError) -> Response:
        status = _status(error)
        if status >= 500:
            log.error("request.failed", path=request.url.path, reason=error.reason, message=error.message)
        if isinstance(error, _MalformedBody) or status != 400:
            return _error(error.message, status=status)
        return _json({"error": {"message": error.message}}, status_code=status)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}; docs/engine.md lists the paths"
        return _error(message, status=error.status_code)

    @app.exception_handler(RequestValidationError)
    async def wrong_query(request: Request, error: RequestValidationError) -> Response:
        return _error(f"{request.url.path}: {error.errors()}", status=400)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        log.error("request.crashed", path=request.url.path, exc_info=error)
        return _error("the engine met a defect; its log has the cause", status=500)


class _RequireKey:
    """Answers 401, in SGLang's form, to whoever does not have the engine's key."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not compare_digest(given, self._expected):
                await _json({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _MalformedBody(InvalidRequest):
    """The body is no JSON, or too large: SGLang answers these in another shape than wrong values."""


async def _body(request: Request) -> object:
    """The parsed body; an empty one counts as an empty object."""
    body = await body_of(request, max_bytes=_MAX_BODY_BYTES)
    if body is None:
        raise _MalformedBody(f"the request body exceeds {_MAX_BODY_BYTES} bytes; send smaller batches")
    try:
        parsed: object = json.loads(body or b"{}")
    except ValueError as error:
        raise _MalformedBody(f"the request body is not JSON: {error}; send application/json") from error
    return parsed


async def _disconnect(request: Request) -> None:
    """Return when the client has closed its connection. Only for use after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _status(error: AstraflowError) -> int:
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def _json(content: object, *, status_code: int = 200) -> Response:
    # NaN is no JSON, and a caller must never train on one: raise here instead of sending it.
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return Response(body, status_code=status_code, media_type="application/json")


def _error(message: str, *, status: int) -> Response:
    kind = HTTPStatus(status).phrase if status == 400 else str(status)
    content = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return _json(content, status_code=status)


def _publish(stats: CoreStats, *, metrics: Metrics) -> None:
    metrics.set("astraflow_engine_requests", stats.num_running, state="running")
    metrics.set("astraflow_engine_requests", stats.num_waiting, state="waiting")
    metrics.set("astraflow_engine_tokens_per_second", stats.tokens_per_s)
    metrics.set("astraflow_engine_tokens", stats.num_generated_tokens, kind="generated")
    metrics.set("astraflow_engine_tokens", stats.num_prompt_tokens, kind="prompt")
    metrics.set("astraflow_engine_tokens", stats.num_cached_tokens, kind="cached")
    metrics.set("astraflow_engine_weight_swaps", stats.num_swaps)
