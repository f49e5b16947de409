"""`astraflow dev` as users run it, as a process that a benchmark measures."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from astraflow_kit.parent import python

_STOP_S = 60.0


@contextmanager
def development_run(
    recipe: Path,
    settings: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
) -> Iterator[psutil.Popen]:
    """`astraflow dev` of a recipe with `settings` as its `--set`; it ends with all of its own when the block does.

    Everything it keeps is in `folder`, which is made; its output in `dev.log` there.
    """
    command = [*python("astraflow.cli", "dev", str(recipe), "--data-dir", str(folder))]
    command += ["--quiet", *options, *(word for setting in settings for word in ("--set", setting))]
    folder.mkdir(parents=True)
    with (folder / "dev.log").open("wb") as output:
        run = psutil.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        yield run
    finally:
        run.terminate()
        try:
            run.wait(timeout=_STOP_S)
        except psutil.TimeoutExpired:
            run.kill()
