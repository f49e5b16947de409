"""One sandbox with a shell, from outside: started, asked, gone.

Invariant: every question has a deadline beyond that of the command inside; when `close` returns nothing of the sandbox
lives, and all that it wrote was memory of bounded size. Called by `adapters.terminal`.
"""

import asyncio
import base64
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from astraflow_environment.terminal import inside
from astraflow_kit.bubblewrap import end_session, require_bubblewrap, start_session, walls

_INSIDE = Path(inside.__file__)
_PLACE = "/run/inside.py"
_GRACE_S = 10.0
VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONNOUSERSITE": "1",  # what a shell leaves in its home is no part of the tests' Python
}
_ETC = {
    "/etc/passwd": b"root:x:0:0:root:/home:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": b"127.0.0.1 localhost\n",
}


class SandboxDied(Exception):
    """The sandbox ended by itself, or did not answer."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What an episode may use."""

    memory_mb: int = 2048
    """Address space of one process."""
    disk_mb: int = 256
    """All files together; they are memory."""
    processes: int = 256

    def as_resources(self) -> dict[str, int]:
        """By the names of `resource`."""
        size = self.disk_mb * 2**20
        return {"RLIMIT_AS": self.memory_mb * 2**20, "RLIMIT_NPROC": self.processes, "RLIMIT_FSIZE": size}


class ShellSandbox:
    """Made by `start`; `close` it."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self._asked = 0

    @classmethod
    async def start(
        cls, files: Mapping[str, bytes], *, folder: str, variables: Mapping[str, str], limits: SandboxLimits
    ) -> "ShellSandbox":
        """Start one with these files, by their paths within. Raises SandboxDied, OSError."""
        child = await start_session(
            *_argv(limits.disk_mb),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath},
            limit=2**24,
        )
        made = cls(child)
        order = {
            "do": "begin",
            "folder": folder,
            "files": _encoded({**_ETC, **files}),
            "variables": {**VARIABLES, **variables},
            "limits": limits.as_resources(),
        }
        try:
            answer = await made.ask(order, seconds=0.0)
            if "error" in answer:
                raise SandboxDied(f"the task's files could not be written: {answer['error']}")
        except BaseException:
            await made.close()
            raise
        return made

    async def run(self, command: str, *, seconds: float, limit: int) -> dict[str, Any]:
        """Run a command: `output`, `status`, `late`, `ended`. Raises SandboxDied."""
        order = {"do": "run", "command": command, "seconds": seconds, "limit": limit}
        return await self.ask(order, seconds=seconds)

    async def grade(self, tests: Mapping[str, bytes], *, seconds: float, limit: int) -> dict[str, Any]:
        """Run tests/test.sh when all else is dead: `reward` as written, `late`, `output`. Raises SandboxDied."""
        order = {"do": "grade", "files": _encoded(tests), "seconds": seconds, "limit": limit}
        return await self.ask(order, seconds=seconds)

    async def ask(self, order: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """Send one order; the answer of one that was cancelled is passed over. Raises SandboxDied."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._asked += 1
        text = json.dumps({**order, "number": self._asked}).encode()
        answer: dict[str, Any] = {}
        try:
            async with asyncio.timeout(seconds + _GRACE_S):
                self._child.stdin.write(len(text).to_bytes(4, "big") + text)
                await self._child.stdin.drain()
                while answer.get("number") != self._asked:
                    size = int.from_bytes(await self._child.stdout.readexactly(4), "big")
                    answer = json.loads(await self._child.stdout.readexactly(size))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxDied(f"{order['do']}: {type(error).__name__}") from error
        return answer

    async def close(self) -> None:
        """Kill all of it. Idempotent."""
        await end_session(self._child)


@lru_cache(maxsize=1)
def require_sandbox() -> None:
    """Raise MissingCapability where this machine cannot run one; asked once a process."""
    require_bubblewrap([*_argv(1)[:-1], "-c", "import ctypes, json, resource"], program=_python())


def _argv(disk_mb: int) -> list[str]:
    return [
        *walls(python=_python(), root=("--size", str(disk_mb * 2**20), "--tmpfs", "/")),
        *("--uid", "0", "--gid", "0", "--proc", "/proc", "--dev", "/dev", "--as-pid-1"),
        *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
        *("--ro-bind", str(_INSIDE), _PLACE, "--", str(_python()), "-I", "-S", _PLACE),
    ]


def _python() -> Path:
    return Path(sys.executable).resolve()


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}
