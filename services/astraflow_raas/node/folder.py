"""The folder one node works in, and the name it has by it.

Invariant: two processes never share a folder: its lock is held as long as the process lives, so a mirror has
one owner and an incarnation number is used once. Opened by `server` before the node joins.
"""

import hashlib
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConflictError
from astraflow_kit.folder_lock import FolderLock, lock_folder
from astraflow_kit.log import get_logger
from astraflow_kit.sandbox.folders import remove_tree

log = get_logger(__name__)

_MAX_NAMES = 1000
_NAME_LENGTH = 56


@dataclass(frozen=True, kw_only=True)
class NodeFolder:
    """A claimed folder."""

    node_id: str
    path: Path
    incarnation: int
    lock: FolderLock

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, the same at every start from this folder on this machine, and nowhere else."""
        place = f"{socket.gethostname()}:{self.path.resolve()}"
        return hashlib.blake2b(place.encode(), digest_size=16).hexdigest()

    @property
    def code(self) -> Path:
        """Where recipe code is written."""
        return self.path / "code"

    @property
    def scratch(self) -> Path:
        """Where each episode may have a folder; the next claim removes those that a killed process left."""
        return self.path.resolve() / "scratch"

    def spool(self, run_id: str) -> Path:
        """Where finished episodes of a run are kept until the server has them safely."""
        return self.path / "spool" / run_id

    @property
    def push_journal(self) -> Path:
        """What was pushed and answered, when the setting asks for it."""
        return self.path / "pushes.jsonl"

    def engine_log(self, policy_id: str, number: int = 1) -> Path:
        """Where the output of a policy's engine goes; engines count from 1."""
        return self.path / f"engine-{policy_id}{f'-{number}' if number > 1 else ''}.log"

    def engine_orders(self, policy_id: str, number: int) -> Path:
        """Where the changes are that an engine is to load, and what loads them."""
        return self.path / f"engine-{policy_id}-{number}-orders"

    def mirror(self, run_id: str, policy_id: str, *, root: Path | None) -> Path:
        """Where the mirror of one policy is, below `root` when given."""
        base = root / self.node_id if root else self.path / "mirror"
        return base / run_id / policy_id

    def release(self) -> None:
        """Give the claim up."""
        self.lock.release()


def claim_folder(work_dir: Path, *, node_id: str) -> NodeFolder:
    """Claim the folder of `node_id` below `work_dir`; an empty name takes the first free one of this host.

    Raises ConflictError, which names the process that runs under the name, and as `lock_folder` does.
    """
    names = [node_id] if node_id else [f"{_host_name()}-{number}" for number in range(1, _MAX_NAMES)]
    for name in names:
        path = work_dir / name
        try:
            lock = lock_folder(path, remedy="stop it, or choose another --node-id or --work-dir")
        except ConflictError:
            if node_id:
                raise
            continue
        claimed = NodeFolder(node_id=name, path=path, incarnation=_next_incarnation(path), lock=lock)
        try:
            remove_tree(claimed.scratch)
        except OSError as error:
            message = f"{error}; remove it as its owner"
            log.error("node.scratch_stays", folder=str(claimed.scratch), message=message)
        claimed.scratch.mkdir(exist_ok=True)
        return claimed
    raise ConflictError(f"{_MAX_NAMES} nodes run in {work_dir}; choose another --work-dir")


def _next_incarnation(path: Path) -> int:
    """Higher than ever before in this folder, and than that of an earlier machine under the same name.

    It is written twice: a damaged one that is another number might lie ahead of the time, and outlive its file.
    """
    counter = path / "incarnation"
    try:
        last, again = map(int, counter.read_bytes().split())
        if last != again:
            raise ValueError(f"{last} and {again}")
    except FileNotFoundError:
        last = 0
    except ValueError:
        log.warning("node.incarnation_damaged", path=str(counter), message="the time takes its place")
        last = 0
    number = max(last + 1, int(time.time() * 1000))
    draft = path / ".incarnation"
    draft.write_text(f"{number} {number}\n")
    draft.replace(counter)
    return number


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._")[:_NAME_LENGTH] or "node"
