"""How a sandbox starts and ends: the leader of a session, in a control group of its own where there are some.

Invariant: a start that is called off, and an end, leave nothing alive and no group. Used by all who start a sandbox.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from astraflow_kit.log import get_logger
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.groups import joining, make_group, remove_group

log = get_logger(__name__)

_END_S = 10.0


class SandboxSession:
    """Made by `start_session`; `end` it."""

    def __init__(self, leader: asyncio.subprocess.Process, *, group: Path | None, wall_s: float) -> None:
        self.leader = leader
        self._group = group
        self._limit = asyncio.get_running_loop().call_later(wall_s, self._kill)

    async def end(self) -> bool:
        """Kill all of it and wait for its leader's end; False where that did not come. Idempotent."""
        self._limit.cancel()
        self._kill()
        return await asyncio.shield(self._ended())

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.leader.pid, signal.SIGKILL)

    async def _ended(self) -> bool:
        has_ended = True
        try:
            async with asyncio.timeout(_END_S):
                await self._drain()
                await self.leader.wait()
        except TimeoutError:
            has_ended = False
            message = "it was killed; a process outside its group keeps its output open"
            log.error("sandbox.not_ended", pid=self.leader.pid, message=message)
        if self._group is not None:
            await remove_group(self._group)
        return has_ended

    async def _drain(self) -> None:
        """asyncio sees the end of a process only when all that it wrote has been read."""
        stdout = self.leader.stdout
        try:
            while stdout is not None and await stdout.read(65_536):
                pass
        except RuntimeError:  # a call that is still under way reads it
            return


async def start_session(*argv: str, budget: Budget, **options: Any) -> SandboxSession:
    """`asyncio.create_subprocess_exec` as the leader of a session on a budget; cancelled, it ends all of it. Raises
    OSError.

    asyncio alone kills only the first process of a start that is cancelled, and where bwrap's outer one dies that early
    its inner one waits for it for ever.
    """
    starting = asyncio.create_task(_started(argv, budget, options), name="start of a session")
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.create_task(_end_started(starting), name="end of a session"))
        raise


def limited(limits: Mapping[str, int], *argv: str) -> tuple[str, ...]:
    """The command line that sets limits, by the names of `resource`, before it becomes `argv`."""
    words = (f"--{name.removeprefix('RLIMIT_').lower()}={limit}" for name, limit in limits.items())
    return ("prlimit", *words, "--", *argv)


async def _started(argv: tuple[str, ...], budget: Budget, options: dict[str, Any]) -> SandboxSession:
    group = make_group(budget)
    try:
        leader = await asyncio.create_subprocess_exec(
            *joining(group, argv), start_new_session=True, **options
        )
    except BaseException:
        if group is not None:
            await remove_group(group)
        raise
    return SandboxSession(leader, group=group, wall_s=budget.wall_s)


async def _end_started(starting: asyncio.Task[SandboxSession]) -> None:
    with suppress(OSError):
        await (await starting).end()
