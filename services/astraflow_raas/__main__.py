"""`python -m astraflow_raas` and `astraflow raas`: options, check, start.

Invariant: an option that is not given leaves the setting to `ASTRAFLOW_*` and then to its default in
`settings`; wrong options end the process with one sentence and status 2. Each alias below is one option,
named like its setting.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from astraflow.errors import AstraflowError
from astraflow_kit import lifecycle
from astraflow_kit.lifecycle import ExitCode
from astraflow_kit.settings import load
from astraflow_raas.settings import NodeSettings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:  # noqa: ANN401 - typer's own type is private
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel)


_RUN, _ENGINE, _PLACES, _PEOPLE = "The run", "The engine", "Folders and limits", "For people and supervisors"

Join = Annotated[str | None, _option(_RUN, "The dataflow server. Required.", metavar="HOST:PORT")]
RunId = Annotated[str | None, _option(_RUN, "Run to join. Default: the only one.")]
NodeId = Annotated[str | None, _option(_RUN, "Stable name of this node. Default: host name and a number.")]
TokenFile = Annotated[Path | None, _option(_RUN, "File with the token for the server.")]
JoinTimeout = Annotated[float | None, _option(_RUN, "Seconds to wait for the server. Default: 120.")]
RecipeCode = Annotated[
    bool,
    _option(
        _RUN,
        "Run the Python files that come with the recipe, as this user. Without it they must be "
        "installed here.",
        "--allow-recipe-code",
    ),
]
Stay = Annotated[bool, _option(_RUN, "Stay joined when the run has finished. Default: leave.", "--stay")]
EngineKind = Annotated[
    str | None,
    _option(
        _ENGINE,
        "`astraflow_engine` (CPU, the default), `sglang`, or the address of an SGLang server that already "
        "runs and sees this node's mirror folder.",
        metavar="KIND|URL",
    ),
]
EnginePython = Annotated[
    Path | None, _option(_ENGINE, "Interpreter of the engine's own environment (SGLang).")
]
EngineArg = Annotated[
    list[str] | None, _option(_ENGINE, "One more argument for the engine; repeat it.", "--engine-arg")
]
EngineThreads = Annotated[
    int | None, _option(_ENGINE, "Threads of a CPU engine; 0 leaves it to the engine. Default: 1.")
]
WorkDir = Annotated[
    Path | None,
    _option(_PLACES, "Folder for mirrors, recipe code and engine logs. Default: ~/.cache/astraflow/raas."),
]
MirrorDir = Annotated[Path | None, _option(_PLACES, "Folder for weight mirrors. Default: in /dev/shm.")]
MaxTasks = Annotated[int | None, _option(_PLACES, "Tasks run at once. Default: the recipe's figure.")]
StoreUrl = Annotated[str | None, _option(_PLACES, "Address of the S3-compatible weight store.")]
StoreRegion = Annotated[str | None, _option(_PLACES, "Region of the weight store. Default: us-east-1.")]
StoreCredentials = Annotated[Path | None, _option(_PLACES, "Shared credentials file for the weight store.")]
Host = Annotated[str | None, _option(_PEOPLE, "Address of NodeService. Default: 127.0.0.1.")]
GrpcPort = Annotated[
    int | None, _option(_PEOPLE, "Port of NodeService. Default: a free one.", "--port", "--grpc-port")
]
HttpPort = Annotated[
    int | None, _option(_PEOPLE, "Port of /status, /metrics, /healthz, /readyz. Default: a free one.")
]
AddressFile = Annotated[Path | None, _option(_PEOPLE, "Where to write ports and pid as JSON.")]
DrainTimeout = Annotated[
    float | None, _option(_PEOPLE, "Seconds between SIGTERM and a hard stop. Default: 30.")
]
LogLevel = Annotated[str | None, _option(_PEOPLE, "debug, info, warning or error. Default: info.")]
LogFormat = Annotated[str | None, _option(_PEOPLE, "auto, json or console. Default: auto.")]
ParentPid = Annotated[int | None, _option(_PEOPLE, "Process to die with.")]
Check = Annotated[
    bool, _option(_PEOPLE, "Validate settings, server, recipe, plug-ins and store, then exit.", "--check")
]


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def raas(
    join: Join = None,
    run_id: RunId = None,
    node_id: NodeId = None,
    token_file: TokenFile = None,
    join_timeout_s: JoinTimeout = None,
    allow_recipe_code: RecipeCode = False,
    stay: Stay = False,
    engine: EngineKind = None,
    engine_python: EnginePython = None,
    engine_args: EngineArg = None,
    engine_threads: EngineThreads = None,
    work_dir: WorkDir = None,
    mirror_dir: MirrorDir = None,
    max_concurrent_tasks: MaxTasks = None,
    store_endpoint_url: StoreUrl = None,
    store_region: StoreRegion = None,
    store_credentials_file: StoreCredentials = None,
    host: Host = None,
    grpc_port: GrpcPort = None,
    http_port: HttpPort = None,
    address_file: AddressFile = None,
    drain_timeout_s: DrainTimeout = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    parent_pid: ParentPid = None,
    check: Check = False,
) -> None:
    """Start a RaaS node: lease tasks, run the recipe's workflow against an engine, push what was sampled.

    The node only dials out. It gets the recipe from the dataflow server and the weights from the run's store,
    starts its engine with the first announced version, refreshes weights while it samples, and outlives
    restarts of server and engine. It ends with status 0 when the run is finished, or on SIGTERM once it has
    finished and pushed what it holds; a second signal stops it at once. Status 2: settings or recipe must
    change. 3: another process uses its name. 75: the server was not reachable.

    Every option can also be given as a variable, such as ASTRAFLOW_JOIN.

    Example: astraflow raas --join 10.0.0.5:7070 --engine sglang --engine-python /opt/sglang/bin/python
    """
    sys.exit(main({name: value for name, value in locals().items() if name != "check"}, check=check))


def main(given: Mapping[str, object], *, check: bool) -> int:
    """Start or check a node with the options given; None, False and [] count as not given."""
    try:
        settings = load(NodeSettings, {name: value for name, value in given.items() if _is_given(value)})
        lifecycle.begin("raas", settings)
        # Loaded only now: `--help` and wrong settings must not wait for grpc, numpy and the tokenizer
        # library.
        from astraflow_raas import server

        if not check:
            return server.run(settings)
        for name, value in asyncio.run(server.check(settings)).items():
            typer.echo(f"{name}: {value}")
    except AstraflowError as error:
        typer.echo(f"{error.reason}: {error.message}", err=True)
        return lifecycle.exit_code_of(error)
    return ExitCode.OK


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []


if __name__ == "__main__":
    app()
