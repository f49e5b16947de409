"""Environments for tests, well and badly behaved, and a service process that serves one.

`served_environment` starts `python -m astraflow_environment`; used by integration and e2e tests.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec, Tool
from astraflow_kit.lifecycle import read_address_file
from support.scripted_dataflow import eventually
from support.source_tree import CLIENT_ROOT, SERVICES

_TESTS = str(Path(__file__).parents[1])


class SayFive:
    """A game of two: who says 5 wins; `over` ends it without a winner."""

    async def reset(self, task: TaskSpec) -> Observation:
        """The first player begins."""
        self.sum, self.moves = 0, 0
        return Observation(messages=(Message("user", "begin"),))

    async def step(self, action: Message) -> Observation:
        """Say it to the other player."""
        word, _, score = action.content.strip().partition(" ")
        self.sum, self.moves = self.sum + (int(word) if word.isdigit() else 0), self.moves + 1
        won = {"win": float(self.moves % 2)} if word == "5" else {"win": float(score)} if score else {}
        return Observation(
            messages=() if word == "silence" else (Message("user", f"said {word}"),),
            reward=0.25 if word == "bonus" else 0.0,
            done=word in ("5", "over"),
            metrics={"sum": float(self.sum), **won},
        )

    async def close(self) -> None:
        """Nothing to free."""


class Counter:
    """Adds up the numbers it gets; every other word is a way to misbehave."""

    def __init__(self, *, goal: int = 10) -> None:
        self.goal, self.sum = goal, 0

    async def reset(self, task: TaskSpec) -> Observation:
        """Start at the task's number."""
        if task.data.get("needs") == "a browser":
            raise MissingCapability("no browser on this machine; install one")
        self.sum = int(task.data.get("start", 0))
        return Observation(messages=(Message("user", f"sum {self.sum}"),))

    async def step(self, action: Message) -> Observation:
        """Add, or misbehave."""
        word = action.content.strip()
        if not word.lstrip("-").isdigit():
            return await self._misbehave(word)
        self.sum += int(word)
        over = self.sum >= self.goal
        return Observation(
            messages=(Message("user", f"sum {self.sum} pid {os.getpid()}"),),
            reward=float(int(word)),
            done=over,
            metrics={"sum": float(self.sum)},
        )

    async def close(self) -> None:
        """Nothing to free."""

    async def _misbehave(self, word: str) -> Observation:
        if word == "raise":
            raise ValueError("the dungeon has no exit")
        if word == "hang":
            while True:
                pass
        if word == "die":
            os._exit(7)
        if word == "flood":
            return Observation(messages=(Message("user", "x" * 2**21),))
        return Observation(reward=float("nan"))


class Sleeper(Counter):
    """Takes too long."""

    async def reset(self, task: TaskSpec) -> Observation:
        """Never returns."""
        await asyncio.Event().wait()
        return await super().reset(task)


class Echo(Counter):
    """Lets the policy say anything, for three turns."""

    async def step(self, action: Message) -> Observation:
        """Count the turn, in a moment."""
        await asyncio.sleep(0.05)
        self.sum += 1
        return Observation(messages=(Message("user", "more"),), reward=1.0, done=self.sum >= 3)


class Kettle:
    """Has a tool."""

    async def reset(self, task: TaskSpec) -> Observation:
        """Show the tool."""
        return Observation(messages=task.messages, tools=(Tool("boil", "Boil water."),))

    async def step(self, action: Message) -> Observation:
        """Answer each call."""
        answers = tuple(Message("tool", "hot", tool_call_id=call.id) for call in action.tool_calls)
        return Observation(messages=answers, reward=float(len(answers)), done=not answers)

    async def close(self) -> None:
        """Nothing to free."""


@dataclass
class ServedEnvironment:
    """A running service."""

    process: asyncio.subprocess.Process
    address: str
    http: str
    log: Path

    async def status(self) -> dict[str, dict[str, int]]:
        """Its page."""
        assert self.process.returncode is None, self.log.read_text()
        async with httpx.AsyncClient() as client:
            try:
                answer = (await client.get(f"http://{self.http}/status")).raise_for_status()
                found: dict[str, dict[str, int]] = answer.json()
            except (httpx.HTTPError, ValueError) as error:  # it ends, perhaps while it answers
                await asyncio.wait_for(self.process.wait(), 20)
                raise AssertionError(self.log.read_text()) from error
        return found

    async def until(self, holds: Callable[[dict[str, dict[str, int]]], bool]) -> Self:
        """Wait for a status. Fails when it ends before."""
        async with asyncio.timeout(30):
            while not holds(await self.status()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        return self

    async def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def served_environment(
    folder: Path,
    *options: str,
    use: str = "support.environments:Counter",
    python: Path | None = None,
    **settings: object,
) -> AsyncIterator[ServedEnvironment]:
    """A service process with a loaded worker; whatever the test leaves of it is killed."""
    addresses, log = folder / "environment.json", folder / "environment.log"
    await asyncio.to_thread(addresses.unlink, missing_ok=True)
    command = [
        str(python or sys.executable),
        "-m",
        "astraflow_environment",
        "--use",
        use,
        "--with",
        json.dumps(settings),
    ]
    command += ["--address-file", str(addresses), *options]
    own = [str(CLIENT_ROOT), str(SERVICES)]  # another interpreter has packages of its own
    paths = os.pathsep.join([_TESTS, *(own if python else filter(None, sys.path))])
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stderr=output, env={**os.environ, "PYTHONPATH": paths}
        )
    try:
        await eventually(
            lambda: addresses.exists() or process.returncode is not None, what="the service listens"
        )
        found = read_address_file(addresses)
        assert found is not None, log.read_text()
        served = ServedEnvironment(process, found.grpc, found.http, log)
        yield await served.until(lambda now: now["workers"]["ready"] == now["workers"]["wanted"])
    except BaseException as error:
        error.add_note(log.read_text()[-4000:])
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
