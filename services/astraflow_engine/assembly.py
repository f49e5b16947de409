"""Puts one engine together: model, core, thread, HTTP; and checks beforehand that there is room for it.

Owns the order of start-up: a model that cannot be served ends the process before it listens.
Called by `__main__`, which must be able to say `--help` without waiting for torch.
"""

import os
from collections.abc import Mapping

import torch

from astraflow_engine.api import ModelLimits
from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.errors import ModelError
from astraflow_engine.model_config import ModelConfig, load_model_config
from astraflow_engine.scheduler import AdmissionLimits
from astraflow_engine.server import ServedModel, create_app
from astraflow_engine.service import EngineService
from astraflow_engine.settings import EngineSettings
from astraflow_engine.weights import load_weights
from astraflow_engine.worker import EngineWorker
from astraflow_kit import lifecycle
from astraflow_kit.clock import SystemClock
from astraflow_kit.http import HttpServer
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.settings import read_secret

DEFAULT_CONTEXT_LENGTH = 4096
_MAX_MEMORY_SHARE = 0.8
# Longer than any client's pool keeps a connection: a close from this side would race with a request.
_KEEP_ALIVE_S = 300

log = get_logger(__name__)


def run(settings: EngineSettings) -> int:
    """Serve until the process drains; the exit code."""
    return lifecycle.run(lambda life: serve(settings, life), drain_timeout_s=settings.drain_timeout_s)


async def serve(settings: EngineSettings, life: lifecycle.Lifecycle) -> None:
    """Serve until `life` drains. Raises ModelError before it listens, EngineFault when the thread fails."""
    torch.set_num_threads(settings.num_threads)
    config = load_model_config(settings.model_path)
    limits = core_limits(settings, config)
    service = _service(settings, config, limits=limits)
    model = ServedModel(
        config=config,
        limits=ModelLimits(vocab_size=config.vocab_size, context_length=limits.capacity),
        settings=settings.model_dump(mode="json", include=set(EngineSettings.__annotations__)),
    )
    api_key = read_secret(settings.api_key_file) if settings.api_key_file else ""
    app = create_app(service, model=model, metrics=Metrics(), api_key=api_key)
    server = HttpServer(app, host=settings.host, port=settings.port, keep_alive_s=_KEEP_ALIVE_S)
    await lifecycle.run_services(
        [service, server],
        lifecycle=life,
        on_started=lambda: _announce(settings, address=server.address),
    )


def check(settings: EngineSettings) -> Mapping[str, object]:
    """Refuse everything that start-up would refuse, without listening; reads the whole checkpoint. What was found."""
    config = load_model_config(settings.model_path)
    limits = core_limits(settings, config)
    weights = load_weights(settings.model_path, config=config)
    return {
        "model_path": settings.model_path,
        "weight_bytes": weights.num_bytes,
        "cache_bytes": limits.cache_bytes(config),
        "context_length": limits.capacity,
    }


def core_limits(settings: EngineSettings, config: ModelConfig) -> CoreLimits:
    """The sizes of the engine for one model. Raises ModelError when the model or the machine has no room."""
    wanted = settings.context_length or min(config.max_positions, DEFAULT_CONTEXT_LENGTH)
    if wanted > config.max_positions:
        raise ModelError(
            f"context_length is {wanted}, {settings.model_path} was made for {config.max_positions} "
            "positions (max_position_embeddings); lower --context-length"
        )
    limits = CoreLimits(
        num_slots=settings.max_running_requests,
        capacity=wanted,
        admission=AdmissionLimits(
            max_waiting=settings.max_queued_requests, max_prefill_tokens=settings.max_prefill_tokens
        ),
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limits.cache_bytes(config) > _MAX_MEMORY_SHARE * memory_bytes:
        raise ModelError(
            f"{limits.num_slots} slots of {wanted} tokens may need {limits.cache_bytes(config)} bytes of "
            f"cache, this machine has {memory_bytes} bytes of memory; lower --max-running-requests or "
            "--context-length"
        )
    return limits


def _service(settings: EngineSettings, config: ModelConfig, *, limits: CoreLimits) -> EngineService:
    clock = SystemClock()
    weights = load_weights(settings.model_path, config=config)
    core = EngineCore(
        config, weights, limits=limits, seed=settings.seed, version=settings.weight_version, clock=clock
    )
    max_in_flight = settings.max_running_requests + settings.max_queued_requests
    return EngineService(
        EngineWorker(core, max_in_flight=max_in_flight, clock=clock),
        config,
        model_path=settings.model_path,
        request_timeout_s=settings.request_timeout_s,
        clock=clock,
    )


def _announce(settings: EngineSettings, *, address: str) -> None:
    lifecycle.write_address_file(settings.address_file, lifecycle.Addresses(http=address))
    log.info(
        "engine.serving",
        address=address,
        model_path=str(settings.model_path),
        weight_version=settings.weight_version,
    )
