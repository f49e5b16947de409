"""The folder one node works in, and the name it has by it.

Invariant: two processes never share a folder: its lock is held as long as the process lives, so a mirror has
one owner, and a session is continued by one process. Opened by `server` before the node joins.
"""

import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import ConflictError, InvalidArgumentError
from astraflow_kit.folder_lock import FolderLock, lock_folder
from astraflow_kit.identity.tokens import ALL
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
    lock: FolderLock

    @property
    def code(self) -> Path:
        """Where recipe code is written."""
        return self.path / "code"

    @property
    def scratch(self) -> Path:
        """Where each episode may have a folder; the next claim removes those that a killed process left."""
        return self.path.resolve() / "scratch"

    def kept_session(self, run_id: str) -> str:
        """The credential of the node's last session in a run; empty for none."""
        try:
            return self._session(run_id).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            log.warning("session.unreadable", path=str(self._session(run_id)), message=str(error))
            return ""

    def keep_session(self, run_id: str, credential: str) -> None:
        """Keep the credential for the next start, readable by this user only; on disk when this returns."""
        path = self._session(run_id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{credential}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)

    def _session(self, run_id: str) -> Path:
        return self.path / "sessions" / run_id

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


def claim_folder(work_dir: Path, *, node_id: str, granted: Sequence[str] = (ALL,)) -> NodeFolder:
    """Claim the folder of `node_id` below `work_dir`; an empty name takes the first free one of this host that is
    `granted`: names, or with `*` what they begin with.

    Raises ConflictError, which names the process that runs under the name, InvalidArgumentError where no name can be
    chosen, and as `lock_folder` does.
    """
    for name in [node_id] if node_id else _own_names(granted):
        path = work_dir / name
        try:
            lock = lock_folder(path, remedy="stop it, or choose another --node-id or --work-dir")
        except ConflictError:
            if node_id:
                raise
            continue
        claimed = NodeFolder(node_id=name, path=path, lock=lock)
        try:
            remove_tree(claimed.scratch)
        except OSError as error:
            message = f"{error}; remove it as its owner"
            log.error("node.scratch_stays", folder=str(claimed.scratch), message=message)
        claimed.scratch.mkdir(exist_ok=True)
        return claimed
    raise ConflictError(f"{_MAX_NAMES} nodes run in {work_dir}; choose another --work-dir")


def _own_names(granted: Sequence[str]) -> Iterator[str]:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "node"
    begins = next((name[:-1] for name in sorted(granted, key=len) if name.endswith(ALL)), None)
    if begins is None:
        yield from granted
        return
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,48}", begins):
        raise InvalidArgumentError(
            f"the token is for nodes named {begins}{ALL}, and no node can be: names have letters, digits, `.`, `_` and "
            "`-`, at most 64; ask for a token with --node PATTERN"
        )
    stem = host if f"{host}-".startswith(begins) else f"{begins}{host}"
    for number in range(1, _MAX_NAMES):
        yield f"{stem[:_NAME_LENGTH]}-{number}"
