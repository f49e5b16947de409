"""Running a command of `astraflow` inside the test's own process, and in one that may be killed."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

from astraflow import cli
from astraflow_kit.failpoints import Hit, read_hits


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    output: str
    errors: str

    @property
    def json(self) -> Any:
        """What it printed."""
        return json.loads(self.output)


class _Written(io.StringIO):
    """What a command writes: this thread and those that it starts. Threads that were there before, such as a server of
    the test, write on to where they did.
    """

    def __init__(self, before: TextIO) -> None:
        super().__init__()
        self._before = before
        self._others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def write(self, text: str) -> int:
        if threading.get_ident() in self._others:
            return self._before.write(text)
        return super().write(text)


def run(*arguments: str) -> Ended:
    """Run `astraflow ARGUMENTS` in this process."""
    output, errors, status = _Written(sys.stdout), _Written(sys.stderr), 0
    with redirect_stdout(output), redirect_stderr(errors), patch("sys.argv", ["astraflow", *arguments]):
        try:
            cli.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Ended(status, output.getvalue(), errors.getvalue())


def run_killed(*arguments: str, failpoint: str, log: Path) -> list[Hit]:
    """Run it in a process of its own in which this failpoint is armed; what was hit. It must die of it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _ARMED, failpoint, str(log), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    return [hit for hit in read_hits(log) if hit.acted]


_ARMED = """
import sys
from pathlib import Path
from astraflow import cli
from astraflow_kit import failpoints
failpoints.arm(sys.argv[1], log_path=Path(sys.argv[2]))
sys.argv = ["astraflow", *sys.argv[3:]]
cli.main()
"""
