"""One sandbox with a shell, and the one of the tests that grade what it left, from outside: started, asked, gone.

Invariant: the tests run in a root, namespaces and processes that the policy has never seen; of the policy's sandbox
only the work folder comes in, by `carry`, and the sandbox is dead before the tests start. Every question has a deadline
beyond that of the command inside; when `close` returns nothing lives, and all that was written was memory of bounded
size. Called by `adapters.terminal`.
"""

import asyncio
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any, TypeVar

from pydantic import BaseModel

from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.sessions import SandboxSession, start_session
from astraflow_kit.sandbox.walls import Walls, system_paths

_MAIN = "astraflow_environment.terminal.inside"
_CODE = ("astraflow_kit/sandbox", "astraflow_environment/terminal")
_GRACE_S = 10.0
_CARRY_S = 30.0
_MAX_FRAME_BYTES = 2**24
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


_OF_TESTS = ("/tmp", "/var/tmp", "/var/home", "/dev/shm", "/logs")
"""What tests may write, besides the work folder."""
_SEARCHED = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "BASH_ENV", "ENV", "PROMPT_COMMAND", "CLASSPATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PERL5LIB", "RUBYLIB", "NODE_PATH"),
)
"""Variables that name what a program runs, or where it looks for that."""
_GRADERS = {
    "HOME": "/var/home",
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    # A repository of the policy names programs of its own.
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}


class SandboxDied(Exception):
    """The sandbox ended by itself, or did not answer."""


class CarryFailed(Exception):
    """The work folder could not be brought to the tests; nothing was graded."""


class Answer(BaseModel):
    """An order was carried out."""


class Ran(Answer):
    """What became of a command."""

    output: str
    status: int | None
    """None when it ended the shell, or did not end in time."""
    late: bool
    ended: bool


class Graded(Answer):
    """What became of the tests."""

    output: str
    late: bool
    reward: str | None
    """As they wrote it."""


_Answer = TypeVar("_Answer", bound=Answer)
# ValueError: no JSON, no object, or one without what was asked for.
_NO_ANSWER = (TimeoutError, asyncio.IncompleteReadError, ConnectionError, ValueError, RecursionError)


class ShellSandbox:
    """Made by `start`; `close` it."""

    def __init__(self, session: SandboxSession, *, about: Mapping[str, Any], budget: Budget) -> None:
        self._session = session
        self._about, self._budget = about, budget
        self._asked = 0

    @classmethod
    async def start(
        cls, files: Mapping[str, bytes], *, folder: str, variables: Mapping[str, str], limits: Budget
    ) -> "ShellSandbox":
        """Start one with these files, by their paths within. Raises SandboxDied, OSError."""
        walls = Walls(
            python=_python(),
            main=_MAIN,
            code=_CODE,
            writable=("/dev/shm",),
            is_root_writable=True,
            is_machine=True,
        )
        files = {normpath(name): content for name, content in files.items()}
        about = {"files": files, "folder": folder, "variables": {**VARIABLES, **variables}}
        return await cls._started(walls, files, about=about, budget=limits)

    @classmethod
    async def _started(
        cls, walls: Walls, files: Mapping[str, bytes], *, about: Mapping[str, Any], budget: Budget
    ) -> "ShellSandbox":
        archive = _archive({**_ETC, **files})
        session = await start_session(
            *walls.command_line(budget, files_bytes=len(archive)),
            budget=budget,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath},
            limit=_MAX_FRAME_BYTES,
        )
        made = cls(session, about=about, budget=budget)
        order = {
            "do": "begin",
            "folder": about["folder"],
            "variables": about["variables"],
            "limits": budget.as_rlimits(),
        }
        try:
            made._stdin.write(archive)
            await made.ask(order, seconds=0.0, answer=Answer)
        except BaseException:
            await made.close()
            raise
        return made

    async def run(self, command: str, *, seconds: float, limit: int) -> Ran:
        """Run a command. Raises SandboxDied."""
        order = {"do": "run", "command": command, "seconds": seconds, "limit": limit}
        return await self.ask(order, seconds=seconds, answer=Ran)

    async def grade(self, tests: Mapping[str, bytes], *, seconds: float, limit: int) -> Graded:
        """Close this one, and run tests/test.sh in another. Raises SandboxDied, CarryFailed."""
        grader = await self._grader(tests)
        try:
            await self.ask({"do": "stop"}, seconds=0.0, answer=Answer)
            await self._carry_to(grader)
            if not await self.close():
                raise SandboxDied("it was killed, and does not end: the tests were not begun")
            order = {"do": "grade", "seconds": seconds, "limit": limit}
            return await grader.ask(order, seconds=seconds, answer=Graded)
        finally:
            await grader.close()

    async def _grader(self, tests: Mapping[str, bytes]) -> "ShellSandbox":
        """A sandbox that has never been this one's: the task's files anew, its tests, an empty work folder."""
        folder = self._about["folder"]
        files = {
            name: content
            for name, content in self._about["files"].items()
            if not PurePosixPath(name).is_relative_to(folder)
        }
        walls = Walls(
            python=_python(), main=_MAIN, code=_CODE, writable=(*_OF_TESTS, folder), is_machine=True
        )
        about = {
            "files": {},
            "folder": folder,
            "variables": graders_variables(self._about["variables"], folder=folder),
        }
        twice = {"disk_mb": 2 * self._budget.disk_mb, "files": 2 * self._budget.files}
        budget = replace(self._budget, **twice)  # a policy that filled its own leaves the tests as much
        return await self._started(walls, {**files, **tests}, about=about, budget=budget)

    async def _carry_to(self, grader: "ShellSandbox") -> None:
        most = 2 * self._budget.disk_bytes + 4096 * self._budget.files
        try:
            async with asyncio.timeout(_CARRY_S):
                self._order({"do": "export"})
                grader._order({"do": "take", "system": system_paths(_python())})
                while frame := await self._frame():
                    most -= len(frame)
                    if most < 0:
                        raise CarryFailed("the work folder is larger than its sandbox")
                    grader._send(frame)
                    await grader._stdin.drain()
                grader._send(b"")
                answers = [await self._answer(), await grader._answer()]
        except _NO_ANSWER as error:
            raise SandboxDied(f"the work folder did not arrive: {type(error).__name__}") from error
        for answer in answers:
            if "error" in answer:
                raise CarryFailed(str(answer["error"]))

    async def ask(self, order: Mapping[str, Any], *, seconds: float, answer: type[_Answer]) -> _Answer:
        """Send one order; the answer of one that was cancelled is passed over. Raises SandboxDied, also for an answer
        that names an error: what the first process cannot do any more, the policy has broken.
        """
        try:
            async with asyncio.timeout(seconds + _GRACE_S):
                self._order(order)
                await self._stdin.drain()
                found = await self._answer()
            if "error" in found:
                raise SandboxDied(f"{order['do']}: {found['error']}")
            return answer.model_validate(found)
        except _NO_ANSWER as error:
            raise SandboxDied(f"{order['do']}: {type(error).__name__}") from error

    async def close(self) -> bool:
        """Kill all of it; False where it does not end. Idempotent."""
        return await self._session.end()

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        assert self._session.leader.stdin is not None
        return self._session.leader.stdin

    def _order(self, order: Mapping[str, Any]) -> None:
        self._asked += 1
        self._send(json.dumps({**order, "number": self._asked}).encode())

    def _send(self, frame: bytes) -> None:
        self._stdin.write(len(frame).to_bytes(4, "big") + frame)

    async def _frame(self) -> bytes:
        """Raises ValueError for one that no sandbox of ours sends."""
        stdout = self._session.leader.stdout
        assert stdout is not None
        size = int.from_bytes(await stdout.readexactly(4), "big")
        if size > _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        return await stdout.readexactly(size)

    async def _answer(self) -> dict[str, Any]:
        """Raises ValueError for one that no sandbox of ours sends."""
        answer: dict[str, Any] = {}
        while answer.get("number") != self._asked:
            answer = json.loads(await self._frame())
            if not isinstance(answer, dict):
                raise ValueError("an answer that is no object")
        return answer


def graders_variables(variables: Mapping[str, str], *, folder: str) -> dict[str, str]:
    """The task's variables without what would have the tests run files of the work folder."""

    def is_trusted(entry: str) -> bool:
        path = PurePosixPath(normpath(entry))
        return path.is_absolute() and not path.is_relative_to(folder)

    searched = {
        name: ":".join(filter(is_trusted, variables[name].replace(" ", ":").split(":")))
        for name in _SEARCHED
        if name in variables
    }
    return {name: value for name, value in {**variables, **searched}.items() if value} | _GRADERS


@lru_cache(maxsize=1)
def require_sandbox() -> None:
    """Raise MissingCapability where this machine cannot run one; asked once a process."""
    Walls(python=_python(), main=_MAIN, code=_CODE, is_machine=True).require(
        probe="import ctypes, json, resource"
    )


def _python() -> Path:
    return Path(sys.executable).resolve()


def _archive(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of files by their absolute paths."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(content), 0o755 if name.endswith((".sh", ".py")) else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return found.getvalue()
