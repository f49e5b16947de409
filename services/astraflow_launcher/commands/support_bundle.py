"""`astraflow support-bundle`: pack what a report about a run needs."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from astraflow.client import Connection
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RUNS, DialOptions, RunIdOption
from astraflow.errors import NotFoundError, UnavailableError
from astraflow_launcher.support.bundle import Evidence, save_bundle

app = typer.Typer(add_completion=False)

OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Archive to write. Default: a new one in this folder."),
]


@app.command("support-bundle")
@grouped_options
def support_bundle(
    options: DialOptions,
    out: OutOption = None,
    run_id: RunIdOption = "",
) -> None:
    """Pack logs, Redis data, weight manifests, versions, recipe, metrics and the server's answers; no weights.

    Looks at the newest run below .astraflow/runs unless another is named. Changes nothing, and works on a run that
    has ended too.
    """
    is_elsewhere = (options.join or options.join_file) and options.data_dir is None
    folder = None if is_elsewhere else _folder(options.data_dir)
    server, refusal = _server(replace(options, data_dir=folder))
    evidence = Evidence(folders=(folder,) if folder else (), server=server, run_id=run_id, note=refusal)
    names = (folder.resolve().name if folder else "", server.address if server else "")
    path = _archive_path(out, name=next(filter(None, names), ""))
    missing = save_bundle(evidence, path)
    typer.echo(f"{path}  ({path.stat().st_size / 2**20:.1f} MiB; README.txt in it says what is what)")
    for gap in missing:
        typer.echo(f"missing: {gap}", err=True)


def _folder(data_dir: Path | None) -> Path:
    """The run folder to pack. Raises NotFoundError when there is none."""
    if data_dir is not None:
        if not data_dir.is_dir():
            raise NotFoundError(f"--data-dir {data_dir} is not a folder; name the folder of a run")
        return data_dir
    runs = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
    if not runs:
        raise NotFoundError(f"no run is found below {RUNS}; give --data-dir DIR or --join HOST:PORT")
    return runs[-1].parent


def _server(options: DialOptions) -> tuple[Connection | None, str]:
    """The server to ask, or nothing and the reason why nobody is asked."""
    try:
        return options.connection(options.server()), ""
    except (NotFoundError, UnavailableError) as error:
        return None, f"The server was not asked: {error.message}\n"


def _archive_path(out: Path | None, *, name: str) -> Path:
    if out is not None:
        return out if out.name.endswith(".tar.gz") else out.with_name(f"{out.name}.tar.gz")
    safe = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in name)
    return Path(f"astraflow-support-{safe}-{datetime.now(tz=UTC):%Y%m%d-%H%M%S}.tar.gz")
