"""`python -m astraflow_engine` and `astraflow engine`: options, check, start.

Invariant: an option that is not given leaves the setting to `ASTRAFLOW_*` and then to its default in
`settings`; wrong options and models that cannot be served end the process with one sentence and status 2.
Started by rollout nodes, which end it by SIGTERM, and by people.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from astraflow.errors import AstraflowError
from astraflow_engine.settings import EngineSettings
from astraflow_kit import lifecycle, log
from astraflow_kit.settings import load

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _option(panel: str, text: str, *names: str) -> Any:  # noqa: ANN401 - typer's own type is private
    return typer.Option(*names, help=text, rich_help_panel=panel)


_MODEL, _SIZE, _PEOPLE = "The model", "Size and speed", "For people and supervisors"

ModelPath = Annotated[
    Path | None, _option(_MODEL, "Folder with config.json and safetensors of a dense Qwen3. Required.")
]
WeightVersion = Annotated[
    str | None, _option(_MODEL, "Name that tokens carry until the first weight update. Default: `default`.")
]
Seed = Annotated[int | None, _option(_MODEL, "Seed of all draws. Default: 0.")]
ContextLength = Annotated[
    int | None,
    _option(_SIZE, "Largest prompt plus generated tokens. Default: the model's, at most 4096."),
]
MaxRunning = Annotated[int | None, _option(_SIZE, "Requests that generate at the same time. Default: 128.")]
MaxQueued = Annotated[int | None, _option(_SIZE, "Requests that may wait before 503. Default: 2048.")]
MaxPrefill = Annotated[int | None, _option(_SIZE, "Prompt tokens taken in at once. Default: 8192.")]
NumThreads = Annotated[int | None, _option(_SIZE, "Torch threads of one pass. Default: 1.")]
RequestTimeout = Annotated[
    float | None, _option(_SIZE, "Age in seconds at which a request is aborted with 504. Default: 600.")
]
Host = Annotated[str | None, _option(_PEOPLE, "Address of the HTTP API. Default: 127.0.0.1.")]
Port = Annotated[int | None, _option(_PEOPLE, "Port of the HTTP API; 0 takes a free one. Default: 30000.")]
Insecure = Annotated[
    bool, _option(_PEOPLE, "Allow an address that others can reach; the API has no login.", "--insecure")
]
AddressFile = Annotated[Path | None, _option(_PEOPLE, "Where to write the bound address and pid as JSON.")]
DrainTimeout = Annotated[
    float | None, _option(_PEOPLE, "Seconds between SIGTERM and a hard stop. Default: 30.")
]
LogLevel = Annotated[str | None, _option(_PEOPLE, "debug, info, warning or error. Default: info.")]
LogFormat = Annotated[str | None, _option(_PEOPLE, "auto, json or console. Default: auto.")]
ParentPid = Annotated[int | None, _option(_PEOPLE, "Process to die with.")]
Check = Annotated[
    bool, _option(_PEOPLE, "Validate settings, read the whole checkpoint, then exit.", "--check")
]


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def engine(
    model_path: ModelPath = None,
    weight_version: WeightVersion = None,
    seed: Seed = None,
    context_length: ContextLength = None,
    max_running_requests: MaxRunning = None,
    max_queued_requests: MaxQueued = None,
    max_prefill_tokens: MaxPrefill = None,
    num_threads: NumThreads = None,
    request_timeout_s: RequestTimeout = None,
    host: Host = None,
    port: Port = None,
    insecure: Insecure = False,
    address_file: AddressFile = None,
    drain_timeout_s: DrainTimeout = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    parent_pid: ParentPid = None,
    check: Check = False,
) -> None:
    """Serve a checkpoint on CPU behind the part of SGLang's HTTP API that rollout nodes use.

    Paths: /generate, /pause_generation, /continue_generation, /update_weights_from_disk, /flush_cache,
    /abort_request, /health, /health_generate, /model_info, /server_info, /metrics.

    Every option can also be given as a variable, such as ASTRAFLOW_MODEL_PATH.

    Example: `python -m astraflow_engine --model-path out/warm --port 30000 --context-length 256`
    """
    given = {name: value for name, value in locals().items() if name != "check"}
    raise typer.Exit(main(given, check=check))


def main(given: Mapping[str, object], *, check: bool) -> int:
    """Start or check an engine with the options given; None and False count as not given."""
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    try:
        settings = load(EngineSettings, options)
        # Loaded only now: `--help` and wrong settings must not wait for torch.
        from astraflow_engine import assembly

        if check:
            log.configure("engine", level=settings.log_level, log_format=settings.log_format)
            assembly.check(settings)
            return lifecycle.ExitCode.OK
    except AstraflowError as error:
        typer.echo(f"{error.reason}: {error.message}", err=True)
        return lifecycle.ExitCode.USAGE
    lifecycle.begin("engine", settings)
    return lifecycle.run(
        lambda life: assembly.serve(settings, life), drain_timeout_s=settings.drain_timeout_s
    )


if __name__ == "__main__":
    app()
