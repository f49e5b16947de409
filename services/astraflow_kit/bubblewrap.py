"""Bubblewrap: what every sandbox of ours has, how one starts and ends, and whether this machine can run one.

Invariant: within are the machine's programs and one interpreter, read-only; no network, no environment of ours, no
capability and no user namespace to gain one. Used by the sandbox that grades programs and by that of shells.
"""

import asyncio
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from astraflow.plugins import MissingCapability

_MACHINES = ("x86_64", "aarch64")
_PROBE_S = 20.0
_REMEDY = (
    "install bubblewrap 0.8 or newer (apt install bubblewrap), allow user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1; in a container, a seccomp profile that permits unshare), or start this "
    "where there is one"
)


def walls(*, python: Path, root: Sequence[str] = ()) -> list[str]:
    """How a command line of bwrap begins; `root` are options for what / is."""
    home = python.parent.parent
    own = ["--ro-bind", str(home), str(home)] if not home.is_relative_to("/usr") else []
    # No --new-session: its inner process would leave the group before it dies with the outer one.
    return [
        "bwrap",
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--clearenv"),
        *("--cap-drop", "ALL", "--hostname", "sandbox", *root),
        *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *_system_folders(),
        *own,
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


async def start_session(*argv: str, **options: Any) -> asyncio.subprocess.Process:
    """`asyncio.create_subprocess_exec` as the leader of a session; cancelled, it ends all of it. Raises OSError.

    asyncio alone kills only the first process of a start that is cancelled, and where bwrap's outer one dies that early
    its inner one waits for it for ever.
    """
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(*argv, start_new_session=True, **options), name="start of a session"
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.create_task(_end_started(starting), name="end of a session"))
        raise


async def _end_started(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    with suppress(OSError):
        await end_session(await starting)


async def end_session(leader: asyncio.subprocess.Process) -> None:
    """Kill all of it and wait for its leader's end. Idempotent."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    await asyncio.shield(leader.wait())


def require_bubblewrap(probe: Sequence[str], *, program: Path) -> None:
    """Raise MissingCapability, with what to do about it, where the command line `probe` does not run: `program` in a
    sandbox.
    """
    if platform.machine() not in _MACHINES or sys.platform != "linux":
        raise MissingCapability(f"no sandbox for {sys.platform} on {platform.machine()}; start this on Linux")
    if shutil.which("bwrap") is None:
        raise MissingCapability(f"no sandbox: there is no bwrap on PATH; {_REMEDY}")
    try:
        done = subprocess.run(probe, capture_output=True, timeout=_PROBE_S, check=False, text=True)
        complaint = (
            "" if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit status {done.returncode}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        complaint = str(error)
    if complaint:
        raise MissingCapability(f"no sandbox: bwrap cannot start {program}: {complaint}; {_REMEDY}")
