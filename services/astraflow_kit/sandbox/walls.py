"""The walls of a sandbox: what a process within may see and write, as a command line, and whether this machine has it.

Invariant: within are the machine's programs and one interpreter, read-only; no network, no environment of ours, no
capability and no user namespace to gain one. All that can be written is one file system in memory, of the budget's
bytes and files. Used by programs that are graded and by shells.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.plugins import MissingCapability
from astraflow_kit.sandbox.budget import Budget

SERVICES = Path(__file__).parents[2]
_CODE = Path("/run/astraflow")
_MACHINES = ("x86_64", "aarch64")
_PROBE_S = 20.0
_REMEDY = (
    "install bubblewrap 0.8 or newer (apt install bubblewrap), allow user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp "
    "profile that permits unshare and mount), or start this where there is one"
)
# bwrap bounds neither the number of files nor several folders together: a namespace around it mounts the file system of
# which all writable folders are parts, over /sys, which no program of ours needs; nobody else sees it. The sandbox's
# files are a tar archive of $3 bytes, the first of standard input. Devices are the host's own, whose modes and times
# could be set where a node is root: a sandbox has them by mounts that are read-only, through which they work.
_AROUND = ("unshare", "--user", "--map-root-user", "--mount", "--", "sh", "-c")
_PREPARE = (
    'set -e; mount -t tmpfs -o "size=$0,nr_inodes=$1,mode=0755" budget /sys; mkdir /sys/root /sys/dev; n="$2"; '
    'while [ "$n" -gt 0 ]; do n=$((n - 1)); mkdir "/sys/$n"; done; for d in $4; do : >"/sys/dev/$d"; '
    'mount -o bind,ro,nosuid,noexec "/dev/$d" "/sys/dev/$d"; done; '
    '[ "$3" = 0 ] || head -c "$3" | tar -xf - -C /sys/root; shift 4; exec bwrap "$@"'
)
_LEAST_DEVICES = ("null", "zero", "urandom")
_DEVICES = (*_LEAST_DEVICES, "full", "random", "tty")
_START = "import sys; sys.path.insert(0, {!r}); from {} import main; main()"


@dataclass(frozen=True, kw_only=True)
class Walls:
    """What is within. `code` are our folders below `services`; `main` is the module that is started."""

    python: Path
    main: str
    code: Sequence[str]
    writable: Sequence[str] = ("/tmp",)
    """Folders that can be written; all others cannot."""
    is_root_writable: bool = False
    """Whether all else can, too."""
    is_machine: bool = False
    """Whether there are /proc, /dev and root, as programs of a shell expect; else the least that Python needs."""
    hostname: str = "sandbox"

    def command_line(self, budget: Budget, *, files_bytes: int = 0, start: str = "") -> list[str]:
        """How to start it, as the leader of a session: one kill of its process group then ends it at any instant.

        `start` is Python that runs instead of `main`.
        """
        folders = sorted(dict.fromkeys(self.writable), key=len)  # an outer one before those in it
        devices = _DEVICES if self.is_machine else _LEAST_DEVICES
        numbers = (budget.disk_bytes, budget.files, len(folders), files_bytes)
        # No --new-session: its inner process would leave the group before it dies with the outer one.
        walls = [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--clearenv"),
            *("--cap-drop", "ALL", "--hostname", self.hostname, "--bind", "/sys/root", "/"),
            *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *_system_folders(),
            *(word for each in self.code for word in ("--ro-bind", str(SERVICES / each), str(_CODE / each))),
            *(_machine() if self.is_machine else _least()),
            *(word for each in devices for word in ("--dev-bind", f"/sys/dev/{each}", f"/dev/{each}")),
            *(("--remount-ro", "/dev") if self.is_machine else ()),
            *(word for at, each in enumerate(folders) for word in ("--bind", f"/sys/{at}", each)),
            *self._python(),
            *(() if self.is_root_writable else ("--remount-ro", "/")),
        ]
        within = [str(self.python), "-I", "-S", "-c", start or started(self.main, _CODE)]
        return [*_AROUND, _PREPARE, *map(str, numbers), " ".join(devices), *walls, "--", *within]

    def require(self, *, probe: str) -> None:
        """Raise MissingCapability, with what to do about it, where this machine does not run the Python of `probe`."""
        if platform.machine() not in _MACHINES or sys.platform != "linux":
            raise MissingCapability(
                f"no sandbox for {sys.platform} on {platform.machine()}; start this on Linux"
            )
        if shutil.which("bwrap") is None:
            raise MissingCapability(f"no sandbox: there is no bwrap on PATH; {_REMEDY}")
        argv = self.command_line(Budget(disk_mb=1, files=100), start=probe)
        if complaint := _complaint(argv):
            raise MissingCapability(f"no sandbox: bwrap cannot start {self.python}: {complaint}; {_REMEDY}")

    def _python(self) -> tuple[str, ...]:
        home = self.python.parent.parent
        return () if home.is_relative_to("/usr") else ("--ro-bind", str(home), str(home))


def started(main: str, code: Path = SERVICES) -> str:
    """The Python that runs `main` of a module below `code`."""
    return _START.format(str(code), main)


def system_paths(python: Path) -> tuple[str, ...]:
    """What is the machine's own within, and can be written by nobody."""
    return ("/usr", "/bin", "/sbin", "/lib", "/lib64", str(python.parent.parent))


def _complaint(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit status {done.returncode}"


def _system_folders() -> list[str]:
    """/bin, /lib and their like: links into /usr on most systems, folders on some."""
    words: list[str] = []
    for folder in map(Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if folder.is_symlink():
            words += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.exists():
            words += ["--ro-bind", str(folder), str(folder)]
    return words


def _machine() -> tuple[str, ...]:
    """The /dev of bwrap is a file system of its own. /proc is read-only, for much of it is the kernel's, which the host
    shares; of a node that is root it could be written.
    """
    return (
        *("--uid", "0", "--gid", "0", "--as-pid-1"),
        *("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"),
        *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
    )


def _least() -> list[str]:
    variables: Mapping[str, str] = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    return [
        *("--uid", "65534", "--gid", "65534", "--chdir", "/tmp", "--dir", "/dev"),
        *(word for name, value in variables.items() for word in ("--setenv", name, value)),
    ]
