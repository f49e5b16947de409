"""Runs the cells of a study: each is `astraflow dev` as a process of its own, and one line when it has finished.

Invariant: a run that fails is a line with its reason and ends nothing else; starting the study again goes on with what
has not finished. When this process ends, by whatever signal, so do the runs. They share the cache of warm starts of the
folder that they are started in. Called by `commands.study`; `astraflow_bench.policies` starts its runs here too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any

from astraflow.errors import AstraflowError, InternalError, PreconditionError
from astraflow_bench.machine import Origin
from astraflow_bench.studies.ledger import Ledger
from astraflow_bench.studies.study import Cell, Measured, Result, Run, Study
from astraflow_kit.family import ending_with_us
from astraflow_kit.parent import python
from astraflow_launcher.view.metrics_file import read_lines

_END_BYTES = 2000
_POLL_S = 0.3
_NEVER = Event()


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
    """Run what has not finished, `jobs` at a time. An interrupt kills the runs and is raised."""
    missing = ledger.missing(cells)
    say(f"{study.name}: {len(cells) - len(missing)} of {len(cells)} cells are there")
    stopped = Event()
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [
            pool.submit(_finish, study, cell, folder=folder, keep_runs=keep_runs, stopped=stopped)
            for cell in missing
        ]
        try:
            for done in as_completed(running):
                result = done.result()
                ledger.append(result)
                say(f"{result.arm}, seed {result.seed}: {_shown(result)} in {result.seconds:.0f} s")
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_recipe(
    recipe: Path, *, overrides: Iterable[str], folder: Path, stopped: Event = _NEVER
) -> tuple[dict[str, Any], Path]:
    """Run a recipe from `folder`; returns its summary and the folder of the run. Raises InternalError with the end of
    the run's own words, also when it was killed because of `stopped`.
    """
    command = [*python("astraflow.cli", "dev", str(recipe.resolve()), "--json", "--quiet")]
    command += [word for item in overrides for word in ("--set", item)]
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    status, output, errors = _run_to_end(command, folder=folder, environment=environment, stopped=stopped)
    if status:
        raise InternalError(
            f"`{' '.join(command)}` ended with status {status}: {errors[-_END_BYTES:].strip()}"
        )
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    return summary, folder / summary["data_dir"]


def _run_to_end(
    command: Sequence[str], *, folder: Path, environment: dict[str, str], stopped: Event
) -> tuple[int, str, str]:
    """Status, output and errors of a command in a session of its own; killed with all of its own by `stopped`, by an
    exception here, and with this process.
    """
    with subprocess.Popen(
        ending_with_us(*command),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            while True:
                try:
                    output, errors = child.communicate(timeout=_POLL_S)
                    return child.returncode, output, errors
                except subprocess.TimeoutExpired:
                    if stopped.is_set():
                        child.send_signal(signal.SIGINT)
        finally:
            child.send_signal(signal.SIGINT)  # kills its family; one that has ended gets no signal


def _finish(study: Study, cell: Cell, *, folder: Path, keep_runs: bool, stopped: Event) -> Result:
    started = time.monotonic()
    recipe = cell.resolved()
    measured, failed = Measured(figures={}), ""
    try:
        summary, root = (study.perform or _perform)(cell, folder, stopped)
    except PreconditionError:
        raise  # of the machine: no other run would fare better
    except AstraflowError as error:
        failed = error.message
    else:
        measured, failed = _measured(study, summary, root)
        if not (keep_runs or failed):
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
        failed=failed,
    )


def _measured(study: Study, summary: dict[str, Any], root: Path) -> tuple[Measured, str]:
    """What a run yielded, or why it yielded nothing: one that ended early lacks steps or evaluations."""
    metrics, events = list(read_lines(root / "metrics.jsonl")), list(_events(root / "logs"))
    try:
        return study.measure(Run(summary=summary, metrics=metrics, events=events)), ""
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
        why = f"the run ended, and lacks what is measured: {error!r}; what it left is in {root}"
        return Measured(figures={}), why


def _perform(cell: Cell, folder: Path, stopped: Event) -> tuple[dict[str, Any], Path]:
    return run_recipe(cell.path, overrides=cell.overrides, folder=folder, stopped=stopped)


def _events(logs: Path) -> Iterator[dict[str, Any]]:
    """What the launcher and the nodes logged, oldest first; a line that is cut short is left out."""
    found = [*logs.glob("node-*.log"), *logs.glob("launcher.log")]
    for path in sorted(found, key=lambda found: found.stat().st_mtime):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{") and line.endswith("}"):
                yield {"log": path.stem, **json.loads(line)}


def _shown(result: Result) -> str:
    if result.failed:
        return f"failed: {result.failed}"
    known = {name: value for name, value in result.measured.figures.items() if value is not None}
    return ", ".join(f"{name} {value:.3g}" for name, value in known.items())
