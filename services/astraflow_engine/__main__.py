"""Start one engine: `python -m astraflow_engine --model-path DIR [--host H --port N] [--check]`.

Owns the order of start-up: settings, model, threads, HTTP; a model that cannot be served ends the process
before it listens. Started by a rollout node (which stops it by SIGTERM) or by a person.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import typer
from fastapi import FastAPI

from astraflow.errors import AstraflowError
from astraflow_engine.api import ModelLimits
from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.model_config import ModelConfig, load_model_config
from astraflow_engine.server import ServedModel, create_app
from astraflow_engine.service import EngineService
from astraflow_engine.settings import DEFAULT_CONTEXT_LENGTH, EngineSettings, core_limits
from astraflow_engine.weights import load_weights
from astraflow_engine.worker import EngineWorker
from astraflow_kit import lifecycle, log
from astraflow_kit.clock import SystemClock
from astraflow_kit.http import HttpServer
from astraflow_kit.metrics import Metrics
from astraflow_kit.settings import load

# Longer than any client's pool keeps a connection: a close from this side would race with a request.
_KEEP_ALIVE_S = 300

logger = log.get_logger("astraflow_engine")
app = typer.Typer(add_completion=False)


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def engine(context: typer.Context) -> None:
    """`astraflow engine` takes the options of `python -m astraflow_engine`, `--help` included."""
    sys.exit(main(context.args))


def main(arguments: list[str] | None = None) -> int:
    """Run the engine until it is told to stop; the exit code for `sys.exit`."""
    options = vars(_parser().parse_args(arguments))
    check_only = bool(options.pop("check"))
    try:
        settings = load(EngineSettings, options)
        if check_only:
            log.configure("engine", level=settings.log_level, log_format=settings.log_format)
            return _check(settings)
    except AstraflowError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return lifecycle.ExitCode.USAGE
    lifecycle.begin("engine", settings)
    torch.set_num_threads(settings.num_threads)
    return lifecycle.run(lambda life: _serve(settings, life), drain_timeout_s=settings.drain_timeout_s)


async def _serve(settings: EngineSettings, life: lifecycle.Lifecycle) -> None:
    config = load_model_config(settings.model_path)
    limits = core_limits(settings, config)
    service = _service(settings, config, limits=limits)
    model = ServedModel(
        limits=ModelLimits(vocab_size=config.vocab_size, context_length=limits.capacity),
        settings=settings.model_dump(mode="json", include=set(EngineSettings.__annotations__)),
    )
    app = create_app(service, model=model, metrics=Metrics())
    server = _AnnouncedServer(app, settings)
    await lifecycle.run_services([service, server], lifecycle=life)


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


class _AnnouncedServer(HttpServer):
    """Says where the engine listens once it does."""

    def __init__(self, app: FastAPI, settings: EngineSettings) -> None:
        super().__init__(app, host=settings.host, port=settings.port)
        self._settings = settings

    async def start(self) -> None:
        await super().start()
        settings = self._settings
        if settings.address_file is not None:
            addresses = lifecycle.Addresses(pid=os.getpid(), http=self.address)
            lifecycle.write_address_file(settings.address_file, addresses)
        logger.info(
            "engine.serving",
            address=self.address,
            model_path=str(settings.model_path),
            weight_version=settings.weight_version,
        )


def _check(settings: EngineSettings) -> int:
    """Everything start-up would refuse, without listening; reads the whole checkpoint."""
    config = load_model_config(settings.model_path)
    limits = core_limits(settings, config)
    weights = load_weights(settings.model_path, config=config)
    logger.info(
        "engine.checked",
        model_path=str(settings.model_path),
        weight_bytes=weights.num_bytes,
        cache_bytes=limits.cache_bytes(config),
        context_length=limits.capacity,
    )
    return lifecycle.ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m astraflow_engine",
        allow_abbrev=False,
        description="A small CPU inference server for dense Qwen3 checkpoints, speaking the part of SGLang's "
        "HTTP API that rollout nodes use: /generate, /pause_generation, /continue_generation, "
        "/update_weights_from_disk, /flush_cache, /abort_request, /health, /model_info, /server_info.",
        epilog="Every option can also be given as ASTRAFLOW_<OPTION>. Example: python -m astraflow_engine "
        "--model-path out/warm --port 30000 --context-length 256 --max-running-requests 64",
    )
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="folder with config.json and safetensors")
    add("--host", help="address of the HTTP API; anything but loopback needs --insecure (default 127.0.0.1)")
    add("--port", type=int, help="port of the HTTP API; 0 takes a free one (default 30000)")
    add("--address-file", type=Path, help="where to write the bound address and the pid as JSON")
    add("--weight-version", help="name that tokens carry until the first weight update (default 'default')")
    add(
        "--context-length",
        type=int,
        help=f"largest prompt plus generated tokens (default: the model's, at most {DEFAULT_CONTEXT_LENGTH})",
    )
    add("--max-running-requests", type=int, help="requests that generate at the same time (default 128)")
    add("--max-queued-requests", type=int, help="requests that may wait before 503 (default 2048)")
    add("--max-prefill-tokens", type=int, help="prompt tokens taken in at once (default 8192)")
    add("--num-threads", type=int, help="torch threads of one pass (default 1)")
    add("--seed", type=int, help="seed of all draws (default 0)")
    add("--request-timeout-s", type=float, help="age at which a request is aborted with 504 (default 600)")
    add("--drain-timeout-s", type=float, help="seconds between SIGTERM and a hard stop (default 30)")
    add("--parent-pid", type=int, help="process to die with")
    add("--log-level", help="debug, info, warning or error (default info)")
    add("--log-format", help="auto, json or console (default auto)")
    add(
        "--insecure", action="store_const", const=True, help="allow a reachable address; the API has no login"
    )
    add("--check", action="store_true", help="validate settings and checkpoint, then exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
