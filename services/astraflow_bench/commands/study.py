"""`astraflow study NAME`: what the system claims, measured again over seeds and arms; docs/studies.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from astraflow.errors import RecipeError
from astraflow_bench.commands.figures_page import figure_rows
from astraflow_bench.commands.results_folder import made
from astraflow_bench.signals import ended_by_sigterm
from astraflow_bench.studies import page
from astraflow_bench.studies.catalogue import studies
from astraflow_bench.studies.ledger import Ledger
from astraflow_bench.studies.running import run_cells
from astraflow_bench.studies.study import Study
from astraflow_kit.folder_lock import lock_folder

app = typer.Typer(add_completion=False)


@app.command()
def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(studies())}.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 … N-1 of every arm.")] = 3,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", callback=made, help="Where NAME.jsonl, .md and .png are.")
    ] = Path("docs/results"),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ARM", help="This arm, or those of a pattern like '*-4'; repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of each run.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key in every run; repeatable."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="async: recorded lengths, one number a line, instead of lognormal ones."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Runs at a time.")] = 1,
    runs: Annotated[
        Path, typer.Option(metavar="FOLDER", callback=made, help="Where runs and warm starts are kept.")
    ] = Path(),
    keep_runs: Annotated[bool, typer.Option(help="Keep the folders of finished runs.")] = False,
    accept_older: Annotated[
        bool,
        typer.Option(
            "--accept-older",
            help="Count cells of a release that lacked keys which now have their default; without it they are refused.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells that have not finished.")
    ] = False,
) -> None:
    """Run a study on this machine, cell by cell: one line of FOLDER/NAME.jsonl each, then a page and a picture.

    Started again it goes on with what has not finished. Status 1: a target was missed or a run failed.
    """
    found = _study(name, lengths)
    try:
        cells = found.cells(seeds=seeds, only=only or (), steps=steps, overrides=overrides or ())
        for cell in cells:
            cell.resolved()
    except (ValueError, RecipeError) as error:
        raise typer.BadParameter(str(error)) from error
    path = out / f"{found.stem}.jsonl"
    if dry_run:
        for cell in Ledger(path, accepts_older=accept_older).missing(cells):
            typer.echo(f"{cell.name}: {' '.join(cell.overrides)}")
        return
    lock = lock_folder(
        runs / ".astraflow" / "studies" / found.name, remedy="end it first, or give other --runs"
    )
    with lock, ended_by_sigterm():
        ledger = Ledger(path, accepts_older=accept_older)
        try:
            run_cells(found, cells, ledger, jobs=jobs, folder=runs, keep_runs=keep_runs, say=_say)
        finally:
            # Of what there is, also after an interrupt; a page that is there is not replaced by an empty one.
            ran, failures = ledger.results, ledger.failures
            figures = page.write(found, ran, out, failures=failures) if ran or failures else []
    typer.echo("\n".join(figure_rows(figures)))
    if failures or any(figure.met is False for figure in figures):
        raise typer.Exit(1)


def _study(name: str, lengths: Path | None) -> Study:
    if lengths is not None and name != "async":
        raise typer.BadParameter(f"only async replays recorded lengths, not {name}", param_hint="--lengths")
    known = studies(_read_lengths(lengths) if lengths is not None else ())
    if name not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="NAME")
    return known[name]


def _read_lengths(path: Path) -> list[float]:
    """One positive number a line. Raises BadParameter naming the line that is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be read: {error.strerror}", param_hint="--lengths"
        ) from error
    numbers = []
    for number, line in enumerate(lines, start=1):
        try:
            numbers.append(float(line))
        except ValueError:
            raise typer.BadParameter(
                f"{path}, line {number}: {line!r} is no number; give one positive number a line",
                param_hint="--lengths",
            ) from None
    if not numbers or not all(0 < one < float("inf") for one in numbers):
        raise typer.BadParameter(
            f"{path} has {len(numbers)} numbers; all must be positive, at least one", param_hint="--lengths"
        )
    return numbers


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
