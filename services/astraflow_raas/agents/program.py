"""An agent as a program: started for one episode, and ended with everything it started.

Invariant: no process of an agent outlives its episode or the node, unless it runs without walls and control groups and
kills the guard before it; nothing that it writes or does not do reaches other episodes: output is bounded, and every
end but status 0 is an `AgentFailed` that says which. Called by `workflows.agent_process`.

Within walls sudo does nothing, and files of other users are nobody's: a user namespace has one user.
"""

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from astraflow.errors import AstraflowError
from astraflow_kit.family import ending_with_us
from astraflow_kit.log import get_logger
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.machine_walls import MachineWalls
from astraflow_kit.sandbox.sessions import limited, start_session

log = get_logger(__name__)

_TAIL_BYTES = 8192
_TAIL_LINES = 4
_END_S = 5.0


class AgentFailed(AstraflowError):
    """An agent did not do its part in this episode; another attempt may go better."""

    reason, code = "AGENT_FAILED", "ABORTED"


# Of memory its data: libraries and engines map far more than they use. Processes of one user are counted over the whole
# machine, so only control groups bound an agent's.
_LIMITS = {"RLIMIT_AS": "RLIMIT_DATA", "RLIMIT_CPU": "RLIMIT_CPU", "RLIMIT_FSIZE": "RLIMIT_FSIZE"}


async def run_program(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float | None,
    budget: Budget,
    walls: MachineWalls | None,
) -> None:
    """Run `command` in `folder` to its end, within `walls`. Raises AgentFailed unless it ends with status 0 in time."""
    output, most = bytearray(), budget.output_kb * 1024
    guarded = ending_with_us(*(walls.command_line(budget, *command, folder=folder) if walls else command))
    limits = {_LIMITS[name]: limit for name, limit in budget.as_rlimits().items() if name in _LIMITS}
    argv = limited(limits, *guarded) if sys.platform == "linux" else guarded
    try:
        session = await start_session(
            *argv,
            budget=budget,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )
    except OSError as error:
        raise AgentFailed(f"the agent cannot be started: {error}") from error
    child = session.leader
    try:
        async with asyncio.timeout(timeout_s):
            await _drain(child, output, most=most)
            status = await child.wait()
    except TimeoutError as error:
        raise _failed(f"the agent did not end within timeout_s {timeout_s}", output) from error
    finally:
        await _end(child)
        await session.end()
    if status != 0:
        raise _failed(f"the agent ended with {_how(status)}", output)


def _how(status: int) -> str:
    """Walls, as a shell, give 128 + n for signal n."""
    number = status - 128 if status > 128 else -status
    return f"signal {signal.Signals(number).name}" if number in signal.valid_signals() else f"status {status}"


async def _drain(child: asyncio.subprocess.Process, output: bytearray, *, most: int) -> None:
    """Keep the end of what the agent writes."""
    assert child.stdout is not None
    num_bytes = 0
    while part := await child.stdout.read(65_536):
        num_bytes += len(part)
        output += part
        del output[:-_TAIL_BYTES]
        if num_bytes > most:
            raise _failed(
                f"the agent wrote more than {most} bytes to its output; have it write to a file", output
            )


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kill what is left of the agent; the guard in front of it does so on SIGINT."""
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGCONT)  # an agent may have stopped its guard
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            # Its pipe is closed only when all of it has been read.
            while child.stdout is not None and await child.stdout.read(65_536):
                pass
            await child.wait()


def _failed(what: str, output: bytes | bytearray) -> AgentFailed:
    text = output.decode(errors="replace").strip()
    log.warning("agent.failed", what=what, output=text)
    tail = " | ".join(text.splitlines()[-_TAIL_LINES:])
    return AgentFailed(f"{what}; its output ended with: {tail}" if tail else f"{what}, and wrote nothing")
