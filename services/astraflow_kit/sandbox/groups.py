"""Control groups (cgroup v2): memory and processes of a sandbox counted together, where this process may make groups.

Invariant: without them nothing fails; each process then has limits of its own, and `describe` says why. Where the group
of this process is delegated to it (as by systemd's `Delegate=yes`) and holds processes, those are moved into a leaf, as
the kernel demands.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from astraflow_kit.log import get_logger
from astraflow_kit.sandbox.budget import Budget

log = get_logger(__name__)

_NEEDED = frozenset(("memory", "pids"))
_LEAF = "astraflow"
_OF_OURS = 8
"""Processes of the sandbox itself."""
_JOIN = 'echo 0 > "$0" && exec "$@"'
_REMOVALS, _AGAIN_S = 200, 0.01


class NoGroups(Exception):
    """This process may not make control groups; says why."""


def make_group(budget: Budget) -> Path | None:
    """A new group of this budget; None where there are none. Raises OSError."""
    try:
        group = _usual_parent() / f"sandbox-{secrets.token_hex(8)}"
    except NoGroups:
        return None
    group.mkdir()
    (group / "memory.max").write_text(str(budget.memory_mb * 2**20 + budget.disk_bytes))
    (group / "pids.max").write_text(str(budget.processes + _OF_OURS))
    if (swap := group / "memory.swap.max").exists():
        swap.write_text("0")
    return group


def joining(group: Path | None, argv: Sequence[str]) -> Sequence[str]:
    """The command line that enters the group before it becomes `argv`."""
    return argv if group is None else ("sh", "-c", _JOIN, str(group / "cgroup.procs"), *argv)


async def remove_group(group: Path) -> None:
    """Kill what is left in it, and remove it."""
    with suppress(OSError):  # kernels before 5.14; then its removal fails, and says so
        (group / "cgroup.kill").write_text("1")
    for _ in range(_REMOVALS):
        try:
            await asyncio.to_thread(group.rmdir)
        except FileNotFoundError:
            return
        except OSError as error:
            problem = error
            await asyncio.sleep(_AGAIN_S)
        else:
            return
    log.error("sandbox.group_stays", group=str(group), message=str(problem))


def describe() -> str:
    """How memory and processes are bounded on this machine."""
    try:
        found = find_parent(Path("/proc/self"), prepare=False)
        return f"memory and processes of a sandbox are bounded together, by control groups in {found}"
    except NoGroups as why:
        return f"memory of a sandbox is bounded by process, not together, because {why}"


@lru_cache(maxsize=1)
def _usual_parent() -> Path:
    return find_parent(Path("/proc/self"))


def find_parent(proc: Path, *, prepare: bool = True) -> Path:
    """The group below which ours may be made, by the files of this process in /proc. Raises NoGroups."""
    try:
        base = _base_of(_mount_of(proc), (proc / "cgroup").read_text())
        if prepare and _lacks(base, "cgroup.subtree_control"):
            _move_into_leaf(base)
        return base
    except OSError as error:
        raise NoGroups(str(error)) from error


def _mount_of(proc: Path) -> Path:
    for words in map(str.split, (proc / "mountinfo").read_text().splitlines()):
        if words[words.index("-") + 1] == "cgroup2":
            return Path(words[4])
    raise NoGroups("no cgroup v2 is mounted")


def _base_of(root: Path, membership: str) -> Path:
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::/")), "")
    if not own or ".." in own:
        raise NoGroups("this process is in no group of cgroup v2 that it can see")
    group = root / own[1:]
    base = group.parent if group.name == _LEAF else group
    if missing := _lacks(base, "cgroup.controllers"):
        raise NoGroups(f"{base} lacks the controllers {', '.join(sorted(missing))}")
    if not os.access(base, os.W_OK):
        raise NoGroups(f"{base} cannot be written; delegate it (systemd: Delegate=yes)")
    if _lacks(base, "cgroup.subtree_control") and not _is_delegated(base):
        raise NoGroups(f"{base} is not delegated (systemd: Delegate=yes)")
    return base


def _lacks(group: Path, file: str) -> frozenset[str]:
    return _NEEDED - set((group / file).read_text().split())


def _is_delegated(group: Path) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _move_into_leaf(base: Path) -> None:
    (base / _LEAF).mkdir(exist_ok=True)
    for pid in (base / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            (base / _LEAF / "cgroup.procs").write_text(pid)
    (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(_NEEDED)))
