"""A pool that is resized by a command of the user: the number of nodes is its last argument.

Invariant: a command that hangs is ended with all that it started; what one that has ended started goes on. Made by
`commands.autoscale`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from astraflow.errors import DeadlineError, InvalidArgumentError, UnavailableError

_TAIL_BYTES = 1000


@dataclass(frozen=True)
class CommandHook:
    """Runs `words`, and the number of nodes after them; status 0 says that the pool is being resized."""

    words: Sequence[str]
    timeout_s: float

    @classmethod
    def parse(cls, command: str, *, timeout_s: float) -> CommandHook:
        """The hook of a command line without a shell. Raises InvalidArgumentError for one that cannot be started."""
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise InvalidArgumentError(f"--command {command!r} cannot be read: {error}") from error
        if not words or shutil.which(words[0]) is None:
            raise InvalidArgumentError(
                f"--command {command!r}: {words[0] if words else 'nothing'!r} is no program that can be started; give "
                "its path, and make it executable"
            )
        return cls(words, timeout_s)

    async def resize(self, nodes: int) -> None:
        """Run the command. Raises UnavailableError with the end of what it said, DeadlineError for a slow one."""
        # A file: a pipe would be read until what the command started has closed it, too.
        with TemporaryFile() as output:
            status = await self._status(nodes, output)
            if status:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
                said = output.read().decode(errors="replace").strip() or "it said nothing"
                raise UnavailableError(f"`{self._line(nodes)}` ended with status {status}: {said}")

    async def _status(self, nodes: int, output: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.words,
                str(nodes),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"`{shlex.join(self.words)}` cannot be started: {error}") from error
        try:
            return await asyncio.wait_for(process.wait(), self.timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"`{self._line(nodes)}` had not ended after {self.timeout_s:g} s and was ended; let it end before the "
                "nodes are there, or give a longer --timeout-s"
            ) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    def _line(self, nodes: int) -> str:
        return shlex.join([*self.words, str(nodes)])
