"""Which server a command asks: the one named by an option, by ASTRAFLOW_JOIN, or by the newest run folder; and the
options that say so.

Invariant: a server that was not named on the command line is named on stderr, so that nobody looks at another
run than they think; and a folder whose server has ended is reported as such, not as a refused connection.
Used by every command of this package.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from google.protobuf.message import Message
from grpc import RpcError

from astraflow.client import Client, RetryPolicy
from astraflow.commands.wording import as_json, console, print_json, say
from astraflow.connecting.connection import Connection, DialFiles, dial
from astraflow.dataflow.v1.admin_service_pb2 import GetServerInfoRequest
from astraflow.errors import InvalidArgumentError, NotFoundError, UnavailableError
from astraflow.join import is_join_string

if TYPE_CHECKING:
    from rich.console import RenderableType

RUNS = Path(".astraflow") / "runs"
ADDRESS_FILE = Path("addresses") / "dataflow.json"
OPERATOR_TOKEN = Path("secrets") / "operator.token"
"""In the folder of a run: the token that its server takes from the person who started it."""
JOIN_VARIABLE = "ASTRAFLOW_JOIN"
_PANEL = "How to reach it"
_PATIENCE = RetryPolicy(total_s=3.0)
_PAUSE_S = 0.1

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Server:
    """A dataflow server and how it was found: by its address or a join string, or by the file of one."""

    target: str = field(repr=False)
    found_by: str
    join_file: Path | None = None
    token_file: Path | None = None
    """The token that its folder has for it."""
    log: Path | None = field(default=None, compare=False)
    """The log that it writes, of one in a run folder."""

    def unheard_s(self) -> float:
        """Seconds since it last wrote to its log; 0 where that is not known."""
        with suppress(OSError):
            return max(0.0, time.time() - self.log.stat().st_mtime) if self.log is not None else 0.0
        return 0.0

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return dial(self.target, join_file=self.join_file, files=DialFiles()).address

    def connection(self, files: DialFiles) -> Connection:
        """How to reach it with what else was given. Raises InvalidArgumentError."""
        if self.token_file is not None:  # of a server that takes no other
            files = replace(files, token_file=self.token_file)
        return dial(self.target, join_file=self.join_file, files=files)


def _with_source(
    context: typer.Context, parameter: typer.CallbackParam, server: Server | None
) -> Server | None:
    source = context.get_parameter_source(parameter.name or "")
    if server is not None and source is not None and source.name == "ENVIRONMENT":
        return replace(
            server, found_by=parameter.envvar if isinstance(parameter.envvar, str) else JOIN_VARIABLE
        )
    if server is not None and is_join_string(server.target):
        raise InvalidArgumentError(
            "--join: a join string holds a token, and every process of this machine reads command lines; put it into "
            f"a file and give --join-file FILE, or set {JOIN_VARIABLE}"
        )
    return server


JoinOption = Annotated[
    Server | None,
    typer.Option(
        "--join",
        metavar="HOST:PORT",
        envvar=JOIN_VARIABLE,
        parser=lambda target: Server(target, "--join"),
        callback=_with_source,
        help=f"Dataflow server. Default: the one of the newest folder below {RUNS} whose run is alive. "
        "The variable may hold a join string.",
        show_envvar=True,
    ),
]
JoinFileOption = Annotated[
    Server | None,
    typer.Option(
        "--join-file",
        metavar="FILE",
        envvar="ASTRAFLOW_JOIN_FILE",
        parser=lambda path: Server("", "--join-file", Path(path)),
        callback=_with_source,
        help="File holding a join string: address, authority and token in one.",
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="DIR", help="Ask the server of this run folder (`astraflow dev --data-dir`)."
    ),
]
RunIdOption = Annotated[str, typer.Option("--run-id", help="Run to look at. Default: the server's only one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; docs/debugging.md says which fields.")]


def _option(name: str, text: str, *, metavar: str | None = "FILE") -> Any:  # noqa: ANN401 - as typer declares it
    variable = f"ASTRAFLOW_{name.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(
        name, metavar=metavar, envvar=variable, show_envvar=False, help=text, rich_help_panel=_PANEL
    )


@dataclass(frozen=True, kw_only=True)
class DialOptions:
    """What every command that dials a server takes: whom it asks, how both prove who they are, and as whom."""

    join: JoinOption = None
    join_file: JoinFileOption = None
    data_dir: DataDirOption = None
    token_file: Annotated[Path | None, _option("--token-file", "File holding your token for the server.")] = (
        None
    )
    ca_file: Annotated[
        Path | None, _option("--ca-file", "PEM certificates of the server's authority. Turns TLS on.")
    ] = None
    public_ca: Annotated[
        bool, _option("--public-ca", "Trust this machine's own authorities. Turns TLS on.", metavar=None)
    ] = False
    server_name: Annotated[
        str, _option("--server-name", "Name that the server's certificate must carry.", metavar="NAME")
    ] = ""
    client_cert_file: Annotated[
        Path | None, _option("--client-cert-file", "PEM certificate for a server that asks for one.")
    ] = None
    client_key_file: Annotated[Path | None, _option("--client-key-file", "Its PEM private key.")] = None
    insecure: Annotated[
        bool,
        _option("--insecure", "Send the token without TLS. For closed test networks only.", metavar=None),
    ] = False

    def server(self) -> Server:
        """The server to ask. Raises InvalidArgumentError, NotFoundError, UnavailableError."""
        if self.join is not None and self.join_file is not None:
            raise InvalidArgumentError(
                f"{self.join.found_by} and {self.join_file.found_by} both name a server; give one of them"
            )
        return find_server(self.join or self.join_file, data_dir=self.data_dir)

    def connection(self, server: Server) -> Connection:
        """How to reach it. Raises InvalidArgumentError."""
        given = {item.name: getattr(self, item.name) for item in fields(DialFiles)}
        return server.connection(DialFiles(**given))


@dataclass(frozen=True, kw_only=True)
class ServerOptions(DialOptions):
    """The same for commands that ask the server, and show its answer in some form."""

    json_: JsonOption = False

    @contextmanager
    def client(self, *, patience_s: float = 0.0, server: Server | None = None) -> Iterator[Client]:
        """A client of the server to ask; with `patience_s` whether there is one is known after that time.

        The error for an unreachable server names its address and how it was found; IncompatibleError says that it
        speaks other contracts, UntrustedServerError that one side does not prove who it is.
        """
        server = server or self.server()
        if not server.found_by.startswith("--"):
            say(f"asking {server.address} ({server.found_by})", err=True)
        with Client(self.connection(server), retry=_PATIENCE) as client:
            try:
                if patience_s:
                    _require_alive(client, patience_s)
                else:
                    client.server_info()
                yield client
            except UnavailableError as error:
                # Something else that the command asked, as a store, or a server that says what it lacks.
                if not isinstance(error.__cause__, RpcError) or error.retry_after_s is not None:
                    raise
                raise UnavailableError(
                    f"no dataflow server answers at {server.address} ({server.found_by}); start it, or give another "
                    f"--join HOST:PORT. It said: {error.message}"
                ) from error

    def show(self, answer: M, text: Callable[[M], RenderableType]) -> None:
        """Print the answer as JSON, or what `text` makes of it: a line as it is, anything else as a page."""
        if self.json_:
            print_json(as_json(answer))
        elif isinstance(made := text(answer), str):
            say(made)
        else:
            console().print(made)


@dataclass(frozen=True, kw_only=True)
class RunOptions(ServerOptions):
    """The same for commands about one run."""

    run_id: RunIdOption = ""


@dataclass(frozen=True)
class _Published:
    """What a folder says about its server."""

    folder: Path
    pid: int
    address: str
    written_ns: int


def find_server(join: Server | None, *, data_dir: Path | None, runs: Path = RUNS) -> Server:
    """Return the server to ask. Raises NotFoundError or UnavailableError with the remedy when there is none."""
    if data_dir is not None:
        return server_of_folder(data_dir)
    if join is not None:
        return join
    published = sorted(
        filter(None, (_published(path) for path in runs.glob("*"))), key=lambda item: item.written_ns
    )
    if not published:
        raise NotFoundError(
            f"no run is found below {runs}: give --join HOST:PORT, set {JOIN_VARIABLE}, or start one with "
            "`astraflow dev`"
        )
    alive = [item for item in published if _is_alive(item.pid)]
    if not alive:
        raise _ended(published[-1])
    return _server(alive[-1])


def server_of_folder(folder: Path) -> Server:
    """Return the server of one run folder. Raises NotFoundError, or UnavailableError when its run has ended."""
    published = _published(folder)
    if published is None:
        raise NotFoundError(f"{folder / ADDRESS_FILE} does not exist: no dataflow server was started there")
    if not _is_alive(published.pid):
        raise _ended(published)
    return _server(published)


def _require_alive(client: Client, patience_s: float) -> None:
    """Raise DeadlineError for a server that does not answer in time, else as `Client.server_info` does."""
    once, give_up_s = RetryPolicy(total_s=0.0), time.monotonic() + patience_s - _PAUSE_S
    while time.monotonic() < give_up_s:
        try:
            client.call(client.admin.GetServerInfo, GetServerInfoRequest(), timeout_s=patience_s, retry=once)
            break
        except UnavailableError:
            time.sleep(_PAUSE_S)
    client.server_info(timeout_s=patience_s, retry=once)


def _server(published: _Published) -> Server:
    token = published.folder / OPERATOR_TOKEN
    return Server(
        published.address,
        f"run folder {published.folder}",
        token_file=token if token.exists() else None,
        log=published.folder / "logs" / "dataflow.log",
    )


def _published(folder: Path) -> _Published | None:
    path = folder / ADDRESS_FILE
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    return _Published(folder, int(content["pid"]), str(content["grpc"]), path.stat().st_mtime_ns)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process is a process
        return True
    return True


def _ended(published: _Published) -> UnavailableError:
    return UnavailableError(
        f"the run of {published.folder} has ended (its server, process {published.pid}, is gone): read its "
        f"summary.json, collect what it left with `astraflow support-bundle --data-dir {published.folder}`, or give "
        "--join HOST:PORT"
    )
