"""Where this node keeps its mirrors: in shared memory where there is room, else in its work folder.

Invariant: a restarted node finds the mirror of its earlier life, and what nobody will ask for again does not stay in
memory: a node keeps mirrors of one run there, removes them when that run is over, and removes those of nodes whose
work folder is gone or that have not run for a day. `server` makes one; `assembly` asks it
for each policy.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from astraflow_kit.log import get_logger
from astraflow_raas.node.folder import NodeFolder

log = get_logger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_OWNER = "node"
_ROOM_SHARE = 1.1
_SLACK_BYTES = 64 * 2**20
_STALE_S = 86_400.0


class MirrorFolders:
    """The mirrors of one node. `root`, when given, decides; `shared_memory` is for tests."""

    def __init__(
        self, folder: NodeFolder, *, root: Path | None = None, shared_memory: Path = SHARED_MEMORY
    ) -> None:
        self._folder = folder
        self._root = root
        name = hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:16]
        self._memory = shared_memory
        self._shared = shared_memory / f"astraflow-{os.getuid()}" / name
        self.run_is_over = False
        """Set when the server says so: then nobody asks for these mirrors again."""

    def find(self, run_id: str, policy_id: str) -> Path | None:
        """The mirror of an earlier life of this node; None when there is none."""
        places = (self._shared / run_id / policy_id, self._own(run_id, policy_id))
        if self._root is not None:
            return self._own(run_id, policy_id)
        return next((place for place in places if (place / "state.json").is_file()), None)

    def choose(self, run_id: str, policy_id: str, *, model_bytes: int) -> Path:
        """A place for a model of this size. Says in the log which and why."""
        found = self.find(run_id, policy_id)
        if found is not None:
            return found
        needed, free = int(model_bytes * _ROOM_SHARE) + _SLACK_BYTES, _free_bytes(self._memory)
        if free < needed:
            place = self._own(run_id, policy_id)
            log.info("mirror.on_disk", folder=str(place), needed_bytes=needed, shared_memory_free_bytes=free)
            return place
        place = self._shared / run_id / policy_id
        place.mkdir(parents=True, exist_ok=True)
        (self._shared / _OWNER).write_text(f"{self._folder.path.resolve()}\n")
        log.info("mirror.in_shared_memory", folder=str(place), needed_bytes=needed)
        return place

    def remove_stale(self, run_id: str) -> None:
        """Remove from shared memory what nobody asks for any more."""
        for folder in self._stale(run_id):
            log.info("mirror.removed", folder=str(folder))
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """The node ends: remove the mirrors when the run is over, else leave them for its next life."""
        if self.run_is_over:
            shutil.rmtree(self._shared, ignore_errors=True)

    def _own(self, run_id: str, policy_id: str) -> Path:
        return self._folder.mirror(run_id, policy_id, root=self._root)

    def _stale(self, run_id: str) -> Iterator[Path]:
        if not self._shared.parent.is_dir():
            return
        for folder in self._shared.parent.iterdir():
            if folder == self._shared:
                yield from (run for run in folder.iterdir() if run.is_dir() and run.name != run_id)
            elif _is_abandoned(folder):
                yield folder


def _is_abandoned(folder: Path) -> bool:
    """Whether the node of a folder is gone for good, as far as can be known."""
    owner = folder / _OWNER
    if not owner.is_file():
        return time.time() - folder.stat().st_mtime > _STALE_S
    node = Path(owner.read_text().strip())
    if not node.is_dir():
        return True
    newest = max((path.stat().st_mtime for path in folder.rglob("state.json")), default=0.0)
    return time.time() - newest > _STALE_S and not _is_locked(node / "lock")


def _is_locked(path: Path) -> bool:
    if not path.is_file():
        return False
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _free_bytes(folder: Path) -> int:
    """0 where there is no such folder or it cannot be written."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return 0
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
