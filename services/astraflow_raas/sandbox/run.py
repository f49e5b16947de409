"""One untrusted program, from its order to its results: started, watched, gone.

Invariant: when `run_program` returns or raises, nothing that it started lives; what comes back is at most what `limits`
allow; results that did not come in time are missing, and `ending` says why. Called by rewards.
"""

import asyncio
import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from astraflow.plugins import RewardFailed
from astraflow_kit.bubblewrap import end_session, start_session
from astraflow_raas.sandbox.bubblewrap import Sandbox


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """What one program may use."""

    test_s: float = 5.0
    """Seconds of one test, or of one call of the program."""
    wall_s: float = 20.0
    """Seconds of all tests together, the start included."""
    memory_mb: int = 512
    """Address space."""
    file_mb: int = 16
    """Size of one file in its /tmp."""
    output_kb: int = 256
    """What it may print in one test."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A program and what to do with it: run as a script (`stdio`), call `name` (`calls`), or run tests (`checks`)."""

    kind: Literal["stdio", "calls", "checks"]
    program: str
    tests: Mapping[str, Sequence[Any] | str]
    """`inputs`, or `sources` and `setup`; the program's process never gets them."""
    name: str = ""


@dataclass(frozen=True)
class Results:
    """One result per test that was reached, in their order; `ending` is `done`, `timeout`, `output_limit` or `died`."""

    results: Sequence[Mapping[str, Any]]
    ending: str


async def run_program(order: Order, *, sandbox: Sandbox, limits: ProgramLimits) -> Results:
    """Run it. Raises RewardFailed when no sandbox could be started."""
    first = {
        "kind": order.kind,
        "program": order.program,
        "name": order.name,
        "machine": platform.machine(),
        "cpu_s": max(1, round(limits.wall_s)),
        **{name: getattr(limits, name) for name in ("test_s", "memory_mb", "file_mb", "output_kb")},
    }
    messages = b"".join(map(_framed, (first, order.tests)))
    verdict, theirs = os.pipe()
    try:
        child = await _start(sandbox, theirs)
        try:
            return await _watch(child, messages, verdict=verdict, order=order, limits=limits)
        finally:
            await end_session(child)
    finally:
        os.close(verdict)


async def _start(sandbox: Sandbox, theirs: int) -> asyncio.subprocess.Process:
    """Start the harness, which alone keeps the end `theirs` of the verdict's pipe."""
    try:
        return await start_session(
            *sandbox.argv(),
            str(theirs),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs,),
            env={"PATH": os.defpath},
        )
    except OSError as error:
        raise RewardFailed(f"cannot start a sandbox: {error}") from error
    finally:
        os.close(theirs)


async def _watch(
    child: asyncio.subprocess.Process, messages: bytes, *, verdict: int, order: Order, limits: ProgramLimits
) -> Results:
    text, ending = bytearray(), "done"
    most = (limits.output_kb * 1024 + 2**20) * _num_tests(order)
    assert child.stdin is not None
    try:
        async with asyncio.timeout(limits.wall_s):
            child.stdin.write(messages)
            with suppress(ConnectionError):
                await child.stdin.drain()
            while chunk := await _read(verdict):
                text += chunk
                if len(text) > most:
                    ending = "output_limit"
                    break
    except TimeoutError:
        ending = "timeout"
    ready, *results = [
        json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")
    ] or [None]
    if ready is None and ending == "done":
        raise RewardFailed("the sandbox did not start; `astraflow raas --check` on this machine says why")
    if ending == "done" and len(results) < _num_tests(order) and not (results and "error" in results[-1]):
        ending = "died"
    return Results(results[: _num_tests(order)], ending)


def _num_tests(order: Order) -> int:
    return len(order.tests["sources" if order.kind == "checks" else "inputs"])


async def _read(number: int) -> bytes:
    """Wait for bytes on a pipe; empty at its end."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(number, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(number)
    return os.read(number, 65_536)


def _framed(message: Mapping[str, object]) -> bytes:
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text
