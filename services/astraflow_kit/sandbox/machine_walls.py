"""Walls around a program that uses the machine as it is: its files, programs and network, nothing of its processes.

Invariant: within, nothing of the machine can be written but what the budget counts and the folders that are named, what
is hidden cannot be read, and no process can be seen that the program did not start. All of them end with the first.
Used by agents; what is graded has `walls`.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.walls import require_start

MAX_RESULT_BYTES = 2**20
"""What is taken of a result."""
# A file system of the budget's bytes and files is mounted over the program's own folder, with what lies there; of what
# it leaves only the result is written to the disk, when all of its processes have ended. Devices are on a read-only
# mount: their modes could be changed else, where the node is root.
_AROUND = ("unshare", "--user", "--map-root-user", "--mount", "--", "sh", "-c")
_PREPARE = (
    'set -e; cd "$2"; mount --rbind /dev /dev; mount -o remount,bind,ro,nosuid,noexec /dev; '
    'mount -t tmpfs -o "size=$0,nr_inodes=$1,mode=0700" budget "$2"; cp -R . "$2"; mkdir "$2/tmp" "$2/shm"; '
    'n="$3"; r="$2/$3"; shift 3; s=0; "$@" || s=$?; if [ -f "$r" ] && [ ! -L "$r" ]; then '
    f'head -c {MAX_RESULT_BYTES} "$r" >"$n"; elif [ -e "$r" ] || [ -L "$r" ]; then mkdir "$n"; fi; exit $s'
)
# The first process of a namespace reaps what others leave; bwrap's own has a folder that no budget counts.
_FIRST = ("sh", "-c", '"$@"; exit $?', "sh")
_TEMPORARY, _SOCKETS = ("/tmp", "/var/tmp"), Path("/run")


@dataclass(frozen=True, kw_only=True)
class MachineWalls:
    """What is within. Paths that do not exist are nowhere; an inner path wins over one around it."""

    own: Path
    """The program's folder: in memory, with copies of what lies there, and removed when it ends."""
    result: str = "result.json"
    """The file that is taken from it; what is no file becomes a folder."""
    shown: Sequence[Path] = ()
    """What can be read although it is in /tmp or in what is hidden."""
    writable: Sequence[Path] = ()
    """Folders, sockets and devices of the machine that are as outside; no budget counts what is written there."""
    hidden: Sequence[Path] = ()
    """Files and folders that are empty within. Of a file that is a link into its own folder, as Kubernetes renews
    secrets, the folder.
    """

    def command_line(self, budget: Budget, *command: str, folder: Path) -> tuple[str, ...]:
        """How to start `command` in `folder`; its status is that of the command, 128 + n for signal n."""
        volume = (str(budget.disk_bytes), str(budget.files), str(self.own), self.result)
        walls = (
            *("bwrap", "--unshare-user", "--disable-userns", "--unshare-pid", "--as-pid-1", "--unshare-ipc"),
            *("--die-with-parent", "--cap-drop", "ALL", "--uid", str(os.getuid()), "--gid", str(os.getgid())),
            *("--ro-bind", "/", "/", "--proc", "/proc", "--remount-ro", "/proc"),
            *("--dev", "/dev", "--bind", str(self.own / "shm"), "/dev/shm"),
            *self._layers(),
            *("--remount-ro", "/dev", "--chdir", str(folder.resolve())),
        )
        return (*_AROUND, _PREPARE, *volume, *walls, "--", *_FIRST, *command)

    def _layers(self) -> Iterator[str]:
        """What lies over the machine's files, an outer folder before those in it."""
        private = [Path(each) for each in _TEMPORARY if Path(each).is_dir() and not Path(each).is_symlink()]
        empty = [each for each in (_SOCKETS, *map(_hiding, self.hidden)) if each.exists()]
        covered = [*private, *empty]
        shown = [each.resolve() for each in (*self.shown, *_needed())]
        layers = [
            *((each, 0, ("--bind", str(self.own / "tmp"))) for each in private),
            *((each, 1, ("--ro-bind", str(each))) for each in shown if _is_below(each, covered)),
            *((each.resolve(), 2, ("--dev-bind", str(each.resolve()))) for each in self.writable),
            *((each, 3, ("--tmpfs",) if each.is_dir() else ("--ro-bind", "/dev/null")) for each in empty),
            (self.own.resolve(), 4, ("--bind", str(self.own))),
        ]
        for path, _, words in sorted(layers, key=lambda layer: (len(layer[0].parts), layer[1])):
            yield from (*words, str(path))
        for path in filter(Path.is_dir, dict.fromkeys(empty)):
            yield from ("--remount-ro", str(path))


@lru_cache(maxsize=1)
def require_machine_walls() -> None:
    """Raise MissingCapability, with what to do about it, where this machine has none; asked once a process."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        argv = MachineWalls(own=own).command_line(Budget(disk_mb=1, files=100), "true", folder=own)
        require_start(argv, what="a program")


def _hiding(path: Path) -> Path:
    path = path.absolute()
    is_renewed = path.is_symlink() and path.resolve().is_relative_to(path.parent.resolve())
    return (path.parent if is_renewed else path).resolve()


def _needed() -> Iterator[Path]:
    """The interpreter, wherever it is, and what says how names are resolved."""
    yield from (Path(sys.prefix), Path(sys.base_prefix), Path("/etc/resolv.conf"))


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return path.exists() and any(path.is_relative_to(folder) for folder in folders)
