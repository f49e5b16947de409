"""One untrusted program, from its order to its results: started, watched, gone.

Invariant: the program and its judge are in sandboxes of their own, joined by two pipes; the expected values are with
the judge, and so is the only descriptor that leads to the verdict. When `run_program` returns or raises, nothing that
it started lives; results that did not come in time are missing, and `ending` says why. Called by rewards.
"""

import asyncio
import json
import os
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from astraflow.plugins import RewardFailed
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.sessions import start_session
from astraflow_raas.programs.sandbox import JUDGE, PROGRAM, Sandbox

_MAX_ROW_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ProgramLimits(Budget):
    """What one program may use; `output_kb` in one test, `wall_s` for all tests together, the start included."""

    test_s: float = 5.0
    """Seconds of one test, or of one call of the program."""
    wall_s: float = 20.0
    cpu_s: int = 60
    memory_mb: int = 512
    disk_mb: int = 32
    files: int = 4096
    processes: int = 64


JUDGES = Budget(cpu_s=600, wall_s=86_400.0, processes=64, disk_mb=32, files=4096)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A program and what to do with it: run as a script (`stdio`), call `name` (`calls`), or run tests (`checks`)."""

    kind: Literal["stdio", "calls", "checks"]
    program: str
    tests: Mapping[str, Sequence[Any] | str]
    """`inputs` and `results`, or `sources` and `setup`; the program's sandbox never gets them."""
    name: str = ""
    tolerance: float = 1e-6
    """Of floats, absolute and relative."""

    @property
    def num_tests(self) -> int:
        """How many results there are to be."""
        return len(self.tests["sources" if self.kind == "checks" else "inputs"])


@dataclass(frozen=True)
class Results:
    """One result per test that was reached, in their order, `{"value": whether it passed}` or `{"error": kind}`;
    `ending` is `done`, `timeout`, `output_limit` or `died`.
    """

    results: Sequence[Mapping[str, Any]]
    ending: str


async def run_program(order: Order, *, sandbox: Sandbox, limits: ProgramLimits) -> Results:
    """Run it. Raises RewardFailed when no sandbox could be started."""
    async with AsyncExitStack() as opened:
        try:
            judge = await opened.enter_async_context(_judged(sandbox, limits, order))
        except OSError as error:
            raise RewardFailed(f"cannot start a sandbox: {error}") from error
        return await _watch(judge, order=order, limits=limits)


@asynccontextmanager
async def _judged(
    sandbox: Sandbox, limits: ProgramLimits, order: Order
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The judge, told what to ask the program, which is started with it: it has no descriptor but the two pipes."""
    pipes = (*os.pipe(), *os.pipe())
    asked, requests, replies, answering = pipes
    quiet: dict[str, Any] = {"stderr": asyncio.subprocess.DEVNULL, "env": {"PATH": os.defpath}}
    async with AsyncExitStack() as sessions:
        try:
            argv = sandbox.command_line(PROGRAM, limits)
            program = await start_session(*argv, budget=limits, stdin=asked, stdout=answering, **quiet)
            sessions.push_async_callback(program.end)
            judge = await start_session(
                *sandbox.command_line(JUDGE, JUDGES),
                budget=JUDGES,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(requests, replies),
                **quiet,
            )
            sessions.push_async_callback(judge.end)
        finally:
            for number in pipes:
                os.close(number)
        assert judge.leader.stdin is not None
        judge.leader.stdin.write(_orders(order, limits, requests=requests, replies=replies))
        yield judge.leader


def _orders(order: Order, limits: ProgramLimits, *, requests: int, replies: int) -> bytes:
    to_program = {
        "kind": order.kind,
        "program": order.program,
        "machine": platform.machine(),
        "limits": limits.as_rlimits(),
        "test_s": limits.test_s,
        "output_bytes": limits.output_kb * 1024,
    }
    to_judge = {
        "program": to_program,
        "limits": JUDGES.as_rlimits(),
        "kind": order.kind,
        "name": order.name,
        "tests": order.tests,
        "tolerance": order.tolerance,
        "descriptors": [requests, replies],
    }
    return json.dumps(to_judge).encode() + b"\n"


async def _watch(judge: asyncio.subprocess.Process, *, order: Order, limits: ProgramLimits) -> Results:
    text, ending = bytearray(), "done"
    assert judge.stdin is not None
    assert judge.stdout is not None
    try:
        async with asyncio.timeout(limits.wall_s):
            with suppress(ConnectionError):
                await judge.stdin.drain()
            while chunk := await judge.stdout.read(65_536):
                text += chunk
                if len(text) > _MAX_ROW_BYTES * (order.num_tests + 1):
                    ending = "output_limit"
                    break
    except TimeoutError:
        ending = "timeout"
    started, *results = [
        json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")
    ] or [None]
    if ending == "done" and not (started and started["started"]):
        raise RewardFailed("the sandbox did not start; `astraflow raas --check` on this machine says why")
    if ending == "done" and len(results) < order.num_tests and not (results and "error" in results[-1]):
        ending = "died"
    return Results(results[: order.num_tests], ending)
