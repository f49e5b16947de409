"""The command line of a sandbox, and whether this machine can run one.

Invariant: within are read-only system libraries, one interpreter, a small /tmp and nothing else: no network, no /etc,
no /proc, no environment, no capability, no user namespace to gain one. Used by `run`.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.plugins import MissingCapability

HARNESS = Path(__file__).parent
_INSIDE = Path("/harness")
_PACKAGE = HARNESS.relative_to(HARNESS.parent.parent)
_START = "import sys; sys.path.insert(0, {!r}); from astraflow_raas.sandbox.inside import main; main()"
_MACHINES = ("x86_64", "aarch64")
_PROBE = "import ctypes, json, select"
_PROBE_S = 20.0
_REMEDY = (
    "install bubblewrap 0.8 or newer (apt install bubblewrap), allow user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1; in a container, a seccomp profile that permits unshare), or start the node "
    "where there is one"
)


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
        home = self.python.parent.parent
        own = ["--ro-bind", str(home), str(home)] if not home.is_relative_to("/usr") else []
        devices = [f"/dev/{name}" for name in ("null", "zero", "urandom")]
        # No --new-session: its inner process would leave the group before it dies with the outer one.
        return [
            "bwrap",
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
            *(
                "--clearenv",
                "--setenv",
                "PATH",
                "/usr/bin",
                "--setenv",
                "HOME",
                "/tmp",
                "--setenv",
                "LANG",
                "C.UTF-8",
            ),
            *("--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
            *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *_system_folders(),
            *own,
            *("--ro-bind", str(HARNESS), str(_INSIDE / _PACKAGE), "--dir", "/dev"),
            *(word for device in devices for word in ("--dev-bind", device, device)),
            *("--size", str(self.tmp_mb * 2**20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"),
        ]


def _system_folders() -> list[str]:
    """/bin, /lib and their like: links into /usr on most systems, folders on some."""
    words: list[str] = []
    for folder in map(Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if folder.is_symlink():
            words += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.exists():
            words += ["--ro-bind", str(folder), str(folder)]
    return words


def open_sandbox(python: str = "") -> Sandbox:
    """Return the sandbox of this machine with the given interpreter, else the node's. Raises MissingCapability."""
    sandbox = Sandbox(python=Path(python or sys.executable).resolve())
    if platform.machine() not in _MACHINES or sys.platform != "linux":
        raise MissingCapability(
            f"no sandbox for {sys.platform} on {platform.machine()}; start the node on Linux"
        )
    if shutil.which("bwrap") is None:
        raise MissingCapability(f"no sandbox: there is no bwrap on PATH; {_REMEDY}")
    complaint = _probe([*sandbox.argv()[:-1], _PROBE])
    if complaint:
        raise MissingCapability(f"no sandbox: bwrap cannot start {sandbox.python}: {complaint}; {_REMEDY}")
    return sandbox


def _probe(argv: Sequence[str]) -> str:
    """Why the command does not run; empty when it does."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_PROBE_S, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit status {done.returncode}"
