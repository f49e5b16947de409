"""Runs the cells of a study: each is `astraflow dev` as a process of its own, and one line when it has finished.

Invariant: a cell that failed writes no line and ends the study when the runs beside it have ended, so starting the
study again goes on with what is missing. Runs share the cache of warm starts of the folder that they are started in.
Called by `commands.study`; `astraflow_bench.policies` starts its runs here too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from astraflow.errors import InternalError
from astraflow.recipe.shipped import shipped_recipes
from astraflow_bench.machine import Origin
from astraflow_bench.studies.ledger import Ledger
from astraflow_bench.studies.study import Cell, Result, Run, Study
from astraflow_launcher.view.metrics_file import read_lines

_END_BYTES = 2000


def run_cells(
    study: Study,
    cells: Sequence[Cell],
    ledger: Ledger,
    *,
    jobs: int,
    folder: Path,
    keep_runs: bool,
    say: Callable[[str], None],
) -> None:
    """Run what the ledger lacks, `jobs` at a time. When one fails no other begins, and its error is raised after those
    beside it have ended: InternalError with the end of the run's own words.
    """
    missing = ledger.missing(cells)
    say(f"{study.name}: {len(cells) - len(missing)} of {len(cells)} cells are there")
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [pool.submit(_finish, study, cell, folder=folder, keep_runs=keep_runs) for cell in missing]
        for done in as_completed(running):
            if done.cancelled():
                continue
            if error := done.exception():
                failure = error
                pool.shutdown(wait=False, cancel_futures=True)
                continue
            result = done.result()
            ledger.append(result)
            say(f"{result.arm}, seed {result.seed}: {_shown(result)} in {result.seconds:.0f} s")
    if failure is not None:
        raise failure


def run_recipe(recipe: Path, *, overrides: Iterable[str], folder: Path) -> tuple[dict[str, Any], Path]:
    """Run a recipe from `folder`; returns its summary and the folder of the run. Raises InternalError."""
    command = [sys.executable, "-m", "astraflow.cli", "dev", str(recipe.resolve()), "--json", "--quiet"]
    command += [word for item in overrides for word in ("--set", item)]
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InternalError(
            f"`{' '.join(command)}` ended with status {done.returncode}: {done.stderr[-_END_BYTES:].strip()}"
        )
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary, folder / summary["data_dir"]


def _finish(study: Study, cell: Cell, *, folder: Path, keep_runs: bool) -> Result:
    started = time.monotonic()
    recipe = cell.resolved()
    summary, root = run_recipe(shipped_recipes()[cell.recipe], overrides=cell.overrides, folder=folder)
    metrics = list(read_lines(root / "metrics.jsonl"))
    measured = study.measure(Run(summary=summary, metrics=metrics, events=list(_events(root / "logs"))))
    if not keep_runs:
        shutil.rmtree(root)
    origin = Origin.here()
    return Result(
        arm=cell.arm,
        seed=cell.seed,
        recipe=recipe,
        measured=measured,
        machine=origin.machine,
        date=origin.date,
        commit=origin.commit,
        load=os.getloadavg()[0],
        seconds=time.monotonic() - started,
    )


def _events(logs: Path) -> Iterator[dict[str, Any]]:
    """What the nodes logged, oldest first; a line that is cut short is left out."""
    for path in sorted(logs.glob("node-*.log"), key=lambda found: found.stat().st_mtime):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{") and line.endswith("}"):
                yield json.loads(line)


def _shown(result: Result) -> str:
    known = {name: value for name, value in result.measured.figures.items() if value is not None}
    return ", ".join(f"{name} {value:.3g}" for name, value in known.items())
