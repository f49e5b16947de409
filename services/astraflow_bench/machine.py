"""Where and when something was measured, as pages of results say it.

Invariant: names the kind of machine and the commit, nothing of its owner: no host name, user or path. The
benchmarks and the quickstart study call it.
"""

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Origin:
    """One line each of a page of results."""

    machine: str
    date: str
    commit: str

    @classmethod
    def here(cls) -> "Origin":
        """This machine, now."""
        cores = len(os.sched_getaffinity(0))
        machine = f"{platform.machine()}, {cpu_name()}, {cores} cores, Python {platform.python_version()}"
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return cls(machine=machine, date=today, commit=_commit())


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _commit() -> str:
    """Of the checkout that this code runs from, with a mark when files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
