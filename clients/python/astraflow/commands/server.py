"""Which server a command asks: the one named by an option, by ASTRAFLOW_JOIN, or by the newest run folder; and the
options that say so.

Invariant: a server that was not named on the command line is named on stderr, so that nobody looks at another
run than they think; and a folder whose server has ended is reported as such, not as a refused connection.
Used by every command of this package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from google.protobuf.message import Message

from astraflow.client import Client, RetryPolicy
from astraflow.commands.wording import as_json, console, print_json
from astraflow.errors import InvalidArgumentError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "RUNS",
    "DataDirOption",
    "JoinOption",
    "RunIdOption",
    "RunOptions",
    "Server",
    "ServerOptions",
    "TokenFileOption",
    "connected",
    "find_server",
    "read_token",
    "server_of_folder",
]

RUNS = Path(".astraflow") / "runs"
ADDRESS_FILE = Path("addresses") / "dataflow.json"
JOIN_VARIABLE = "ASTRAFLOW_JOIN"
_PATIENCE = RetryPolicy(total_s=3.0)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Server:
    """A dataflow server and how it was found."""

    address: str
    found_by: str


def _with_source(
    context: typer.Context, parameter: typer.CallbackParam, server: Server | None
) -> Server | None:
    source = context.get_parameter_source(parameter.name or "")
    from_variable = server is not None and source is not None and source.name == "ENVIRONMENT"
    return Server(server.address, JOIN_VARIABLE) if server is not None and from_variable else server


JoinOption = Annotated[
    Server | None,
    typer.Option(
        "--join",
        metavar="HOST:PORT",
        envvar=JOIN_VARIABLE,
        parser=lambda address: Server(address, "--join"),
        callback=_with_source,
        help=f"Dataflow server. Default: the one of the newest folder below {RUNS} whose run is alive.",
    ),
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="DIR", help="Ask the server of this run folder (`astraflow dev --data-dir`)."
    ),
]
RunIdOption = Annotated[str, typer.Option("--run-id", help="Run to look at. Default: the server's only one.")]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File holding your token for the server.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; docs/debugging.md says which fields.")]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What every command that asks a server takes: whom it asks, as whom, and in which form it answers."""

    join: JoinOption = None
    data_dir: DataDirOption = None
    token_file: TokenFileOption = None
    json_: JsonOption = False

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client of the server to ask; see `connected`."""
        with connected(self.join, data_dir=self.data_dir, token_file=self.token_file) as (client, _):
            yield client

    def show(self, answer: M, text: Callable[[M], RenderableType]) -> None:
        """Print the answer as JSON, or what `text` makes of it: a line as it is, anything else as a page."""
        if self.json_:
            print_json(as_json(answer))
        elif isinstance(made := text(answer), str):
            typer.echo(made)
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
    return Server(alive[-1].address, f"run folder {alive[-1].folder}")


def server_of_folder(folder: Path) -> Server:
    """Return the server of one run folder. Raises NotFoundError, or UnavailableError when its run has ended."""
    published = _published(folder)
    if published is None:
        raise NotFoundError(f"{folder / ADDRESS_FILE} does not exist: no dataflow server was started there")
    if not _is_alive(published.pid):
        raise _ended(published)
    return Server(published.address, f"run folder {folder}")


@contextmanager
def connected(
    join: Server | None, *, data_dir: Path | None, token_file: Path | None
) -> Iterator[tuple[Client, Server]]:
    """Yield a client of the server to ask. The error for an unreachable server names its address and how it was found;
    IncompatibleError says that it speaks other contracts.
    """
    server = find_server(join, data_dir=data_dir)
    if server.found_by != "--join":
        typer.echo(f"asking {server.address} ({server.found_by})", err=True)
    with Client(server.address, token=read_token(token_file), retry=_PATIENCE) as client:
        try:
            client.server_info()
            yield client, server
        except UnavailableError as error:
            raise UnavailableError(
                f"no dataflow server answers at {server.address} ({server.found_by}); start it, or give another "
                f"--join HOST:PORT. It said: {error.message}",
                retry_after_s=error.retry_after_s,
            ) from error


def read_token(token_file: Path | None) -> str | None:
    """Return the token in a file; None without one. Raises InvalidArgumentError for a file that is missing."""
    if token_file is None:
        return None
    if not token_file.is_file():
        raise InvalidArgumentError(
            f"--token-file {token_file} does not exist; name a file that holds the token"
        )
    return token_file.read_text().strip()


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
