"""How the program under test and its judge are started: each in a sandbox of its own.

Invariant: beside the walls of every sandbox there is a small /tmp, and no /etc, no /proc, nothing to write elsewhere.
Used by `run`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.walls import Walls, started

PROGRAM, JUDGE = "astraflow_raas.programs.program", "astraflow_raas.programs.judge"
_CODE = ("astraflow_kit/sandbox", "astraflow_raas/programs")
_PROBE = "import ctypes, json, select"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """How programs are started; `isolated=False` starts them without bubblewrap: then they may read what you may."""

    python: Path
    isolated: bool = True
    hostname: str = "sandbox"

    def command_line(self, main: str, budget: Budget) -> list[str]:
        """How to start a module, as the leader of a session."""
        if not self.isolated:
            return [str(self.python), "-I", "-S", "-c", started(main)]
        return self._walls(main).command_line(budget)

    def require(self) -> None:
        """Raise MissingCapability where this machine cannot run it."""
        self._walls(PROGRAM).require(probe=_PROBE)

    def _walls(self, main: str) -> Walls:
        return Walls(python=self.python, main=main, code=_CODE, hostname=self.hostname)


def open_sandbox(python: str = "") -> Sandbox:
    """Return the sandbox of this machine with the given interpreter, else the node's. Raises MissingCapability."""
    sandbox = Sandbox(python=Path(python or sys.executable).resolve())
    sandbox.require()
    return sandbox
