"""The command line of a sandbox for programs that are graded.

Invariant: beside the walls of every sandbox there is a small /tmp, and no /etc, no /proc, nothing to write elsewhere.
Used by `run`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from astraflow_kit.bubblewrap import require_bubblewrap, walls

HARNESS = Path(__file__).parent
_INSIDE = Path("/harness")
_PACKAGE = HARNESS.relative_to(HARNESS.parent.parent)
_START = "import sys; sys.path.insert(0, {!r}); from astraflow_raas.sandbox.inside import main; main()"
_PROBE = "import ctypes, json, select"


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """How programs are started; `isolated=False` starts them without bubblewrap: then they may read what you may."""

    python: Path
    isolated: bool = True
    tmp_mb: int = 32

    def argv(self) -> list[str]:
        """The command line of one harness. Start it as the leader of a session: one kill of its process group then
        ends it at any instant.
        """
        start = _START.format(str(_INSIDE if self.isolated else HARNESS.parent.parent))
        return [*(self._walls() if self.isolated else ()), str(self.python), "-I", "-S", "-c", start]

    def _walls(self) -> list[str]:
        devices = [f"/dev/{name}" for name in ("null", "zero", "urandom")]
        variables = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
        return [
            *walls(python=self.python),
            *("--uid", "65534", "--gid", "65534"),
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            *("--ro-bind", str(HARNESS), str(_INSIDE / _PACKAGE), "--dir", "/dev"),
            *(word for device in devices for word in ("--dev-bind", device, device)),
            *("--size", str(self.tmp_mb * 2**20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"),
        ]


def open_sandbox(python: str = "") -> Sandbox:
    """Return the sandbox of this machine with the given interpreter, else the node's. Raises MissingCapability."""
    sandbox = Sandbox(python=Path(python or sys.executable).resolve())
    require_bubblewrap([*sandbox.argv()[:-1], _PROBE], program=sandbox.python)
    return sandbox
