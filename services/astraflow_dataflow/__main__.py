"""`python -m astraflow_dataflow` and `astraflow dataflow`: options, check, start.

An option that is not given leaves the setting to `ASTRAFLOW_*` and then to its default in `settings`; wrong
options end the process with one sentence and status 2.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from astraflow.errors import AstraflowError
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_kit import lifecycle
from astraflow_kit.lifecycle import ExitCode
from astraflow_kit.settings import load

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:  # noqa: ANN401 - typer's own type
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel)


_DATA, _SERVE, _PEOPLE = "The data", "Serving", "For people and supervisors"

Redis = Annotated[
    str | None,
    _option(
        _DATA,
        "Redis 7.0 or newer, or Valkey, with an append-only file. Required.",
        metavar="redis://HOST:PORT/DB",
    ),
]
Volatile = Annotated[
    bool,
    _option(
        _DATA, "Accept a Redis without an append-only file; a restart then loses data.", "--allow-volatile"
    ),
]
Durability = Annotated[
    str | None,
    _option(
        _DATA,
        "What acknowledgements wait for: memory, fsynced (the disk of Redis) or replicated. Default: memory.",
        metavar="LEVEL",
    ),
]
RecipeCode = Annotated[
    bool,
    _option(
        _DATA,
        "Run the Python files that come with recipes (data set, filters), as this user. Without it they must be "
        "installed here.",
        "--allow-recipe-code",
    ),
]
WorkDir = Annotated[
    Path | None, _option(_DATA, "Folder for recipe code. Default: ~/.cache/astraflow/dataflow.")
]
BatchLease = Annotated[
    float | None, _option(_DATA, "Seconds in which a trainer renews its batch before an alarm. Default: 120.")
]
Patience = Annotated[
    float | None,
    _option(
        _DATA, "Seconds without progress until an evaluation of an old version is given up. Default: 45."
    ),
]
Host = Annotated[str | None, _option(_SERVE, "Address of the gRPC server. Default: 127.0.0.1.")]
GrpcPort = Annotated[
    int | None, _option(_SERVE, "Port of the gRPC server. Default: a free one.", "--port", "--grpc-port")
]
CertFile = Annotated[Path | None, _option(_SERVE, "PEM certificate chain; needs the key file.")]
KeyFile = Annotated[Path | None, _option(_SERVE, "PEM private key; needs the certificate file.")]
TokensFile = Annotated[Path | None, _option(_SERVE, "Who may call: lines `subject role[,role] sha256:HEX`.")]
Insecure = Annotated[bool, _option(_SERVE, "Allow a reachable address without TLS and tokens.", "--insecure")]
HttpHost = Annotated[str | None, _option(_PEOPLE, "Address of the pages. Default: 127.0.0.1.")]
HttpPort = Annotated[
    int | None, _option(_PEOPLE, "Port of /status, /metrics, /healthz, /readyz. Default: a free one.")
]
InsecureHttp = Annotated[bool, _option(_PEOPLE, "Allow the pages on a reachable address.", "--insecure-http")]
AddressFile = Annotated[Path | None, _option(_PEOPLE, "Where to write ports and pid as JSON.")]
DrainTimeout = Annotated[
    float | None, _option(_PEOPLE, "Seconds between SIGTERM and a hard stop. Default: 30.")
]
LogLevel = Annotated[str | None, _option(_PEOPLE, "debug, info, warning or error. Default: info.")]
LogFormat = Annotated[str | None, _option(_PEOPLE, "auto, json or console. Default: auto.")]
ParentPid = Annotated[int | None, _option(_PEOPLE, "Process to die with.")]
Check = Annotated[bool, _option(_PEOPLE, "Validate settings and Redis, then exit.", "--check")]


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def dataflow(
    redis: Redis = None,
    allow_volatile: Volatile = False,
    durability: Durability = None,
    allow_recipe_code: RecipeCode = False,
    work_dir: WorkDir = None,
    batch_lease_s: BatchLease = None,
    evaluation_patience_s: Patience = None,
    host: Host = None,
    grpc_port: GrpcPort = None,
    tls_cert_file: CertFile = None,
    tls_key_file: KeyFile = None,
    tokens_file: TokensFile = None,
    insecure: Insecure = False,
    http_host: HttpHost = None,
    http_port: HttpPort = None,
    insecure_http: InsecureHttp = False,
    address_file: AddressFile = None,
    drain_timeout_s: DrainTimeout = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    parent_pid: ParentPid = None,
    check: Check = False,
) -> None:
    """Start a dataflow server: tasks are leased to nodes, episodes come back, batches go to trainers.

    All state is in Redis: the server may be killed at any time, and several may serve the same data. It ends
    with status 0 on SIGTERM; a second signal stops it at once. Status 2: settings must change. 3: the data in
    Redis belongs to another release, or Redis is not safe to use. 75: Redis was not reachable.

    Every option can also be given as ASTRAFLOW_<OPTION>.

    Example: astraflow dataflow --redis redis://127.0.0.1:6379 --port 7070 --http-port 7071
    """
    sys.exit(main({name: value for name, value in locals().items() if name != "check"}, check=check))


def main(given: Mapping[str, object], *, check: bool) -> int:
    """Start or check a server with the options given; those unset or False count as not given."""
    try:
        options = {name: None if value is False else value for name, value in given.items()}
        settings = load(DataflowServerSettings, options)
        lifecycle.begin("dataflow", settings)
        # Loaded only now: `--help` and wrong settings must not wait for grpc and numpy.
        from astraflow_dataflow import server

        if not check:
            return server.run(settings)
        for name, value in asyncio.run(server.check(settings)).items():
            typer.echo(f"{name}: {value}")
    except AstraflowError as error:
        typer.echo(f"{error.reason}: {error.message}", err=True)
        return lifecycle.exit_code_of(error)
    return ExitCode.OK


if __name__ == "__main__":
    app()
