"""The end of children that were started with `family.ending_with_us`, each as the leader of a session."""

import asyncio
import os
import signal
from contextlib import suppress

_AGAIN_S = 0.5
_PATIENCE_S = 5.0


async def kill_family(child: asyncio.subprocess.Process) -> None:
    """Kill it with everything that it started, also what left its process group, and wait for its end. Idempotent."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + _PATIENCE_S
    while child.returncode is None:
        with suppress(ProcessLookupError):
            if loop.time() < give_up_s:
                # Again and again: a guard that has just been started may not listen yet. Not by `send_signal`, which
                # takes the status of one that has ended away from asyncio, and asyncio then makes one up (255).
                os.kill(child.pid, signal.SIGINT)
            else:
                os.killpg(child.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _AGAIN_S)
