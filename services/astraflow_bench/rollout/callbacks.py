"""How long the callbacks of a daemon's event loop hold its thread: while one runs, nothing else of the daemon does.

Invariant: the daemon's own code is unchanged; Python times each callback from outside, in CPU time, so that other
programs of the machine do not count. Called by `node`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from astraflow_bench.figures import Figure
from astraflow_bench.rollout.watching import sitecustomize

MOST_CPU_MS = 50.0


@dataclass
class CallbackWatch:
    """Callbacks of one module's process, which is started with `environment`."""

    module: str
    file: Path
    _read: int = 0

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process and its children are started with."""
        folders = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            sitecustomize.MODULE: self.module,
            sitecustomize.FILE: str(self.file),
        }

    def new(self) -> list[tuple[float, str]]:
        """CPU milliseconds and name of those of at least 5 ms since the last time this was asked, the longest first."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        found, self._read = [json.loads(line) for line in lines[self._read :]], len(lines)
        return sorted(((1e3 * each["cpu_s"], each["callback"]) for each in found), reverse=True)

    def figure(self, name: str) -> Figure:
        """The longest since the last time; the row names it when it is too long."""
        cpu_ms, callback = next(iter(self.new()), (1e3 * sitecustomize.LEAST_S, ""))
        which = f" ({callback})" if cpu_ms > MOST_CPU_MS else ""
        return Figure(
            what=f"{name}: longest callback of the node{which}",
            subject="",
            value=cpu_ms,
            unit="CPU-ms",
            most=MOST_CPU_MS,
        )
