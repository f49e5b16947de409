"""The conformance suite: cases from JSON, run by a driver in any language against a real server.

A driver is a program that does one operation per line of its input and answers with one line (docs/clients.md). What is
right is decided here, so a driver only translates. `Suite.run` is one case.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Json = Any
CASES = Path(__file__).parent / "cases"
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    server: str
    """`dataflow`, `tokens`, `tls` (with tokens), `process` (one that can be restarted), `scripted` or `none`."""
    steps: Sequence[Mapping[str, Json]]

    def __str__(self) -> str:
        return self.name


def cases() -> list[Case]:
    """All cases, named after their files."""
    found = []
    setups = json.loads((CASES.parent / "setups.json").read_text())
    for path in sorted(CASES.glob("*.json")):
        table = json.loads(path.read_text())
        for row in expanded(table["cases"]):
            server = row.get("server", table.get("server", "none"))
            found.append(Case(f"{path.stem}: {row['name']}", server, list(written_out(row["steps"], setups))))
    return found


def written_out(
    steps: Sequence[Mapping[str, Json]], setups: Mapping[str, Json]
) -> Iterator[Mapping[str, Json]]:
    """The steps, with those of a set-up where one is used."""
    for step in steps:
        yield from written_out(setups[step["use"]], setups) if "use" in step else [step]


def expanded(rows: Sequence[Mapping[str, Json]]) -> Iterator[Mapping[str, Json]]:
    """The rows, with those that have `each` once for each of its entries, whose fields are variables."""
    for row in rows:
        for values in row.get("each", [{}]):
            yield filled(row, {f"each.{name}": value for name, value in values.items()}, partly=True)


class Driver:
    """A driver program. Operations may be sent while others are waiting for their answer."""

    def __init__(self, command: Sequence[str], *, language: str) -> None:
        self.language = language
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._waiting: dict[int, Future[Json]] = {}
        self._num_sent = 0
        self._reader = threading.Thread(target=self._read, name="conformance-driver", daemon=True)
        self._reader.start()

    def send(self, operation: Mapping[str, Json]) -> Future[Json]:
        """Send an operation; the future has the reply."""
        assert self._process.stdin is not None
        self._num_sent += 1
        reply = self._waiting[self._num_sent] = Future[Json]()
        self._process.stdin.write(json.dumps({**operation, "id": self._num_sent}) + "\n")
        return reply

    async def do(self, operation: Mapping[str, Json]) -> Json:
        """Send an operation and wait for its reply."""
        return await asyncio.wait_for(asyncio.wrap_future(self.send(operation)), PATIENCE_S)

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                reply = json.loads(line)
                waiting = self._waiting.pop(reply.pop("id"))
                if waiting.set_running_or_notify_cancel():
                    waiting.set_result(reply)
        finally:
            for waiting in filter(Future.set_running_or_notify_cancel, self._waiting.values()):
                waiting.set_exception(
                    AssertionError(f"the driver ended, or wrote no reply: {self._process.args}")
                )


class Server(Protocol):
    """What a case talks to."""

    address: str

    async def control(self, step: Mapping[str, Json]) -> Json:
        """Do what a step asks of the server itself, and return what it saw."""


@dataclass
class Suite:
    """Runs the steps of one case."""

    driver: Driver
    server: Server | None
    variables: dict[str, Json]
    _pending: dict[str, Future[Json]] = field(default_factory=dict)

    async def run(self, case: Case) -> None:
        """Raises AssertionError with the step that went wrong."""
        if self.server is not None:
            self.variables["address"] = self.server.address
            if not any(step.get("op") == "connect" for step in case.steps):
                await self.driver.do({"op": "connect", "address": self.server.address})
        try:
            for number, step in enumerate(case.steps, start=1):
                try:
                    await self._step(step)
                except AssertionError as error:
                    raise AssertionError(
                        f"{case.name}, step {number} {json.dumps(step)[:300]}: {error}"
                    ) from None
        finally:
            await self.driver.do({"op": "reset"})

    async def _step(self, written: Mapping[str, Json]) -> None:
        step = filled(written, self.variables)
        if "server" in step:
            assert self.server is not None
            reply = await self.server.control(step)
        elif "await" in step:
            pending = asyncio.wrap_future(self._pending.pop(step["await"]))
            reply = await asyncio.wait_for(pending, PATIENCE_S)
        elif "start" in step:
            self._pending[step["start"]] = self.driver.send(step)
            return
        else:
            reply = await self._until(step)
        if "expect" in step:
            problem = difference(step["expect"], reply, at="reply")
            assert problem is None, f"{problem}\nin {json.dumps(reply)[:2000]}"
        elif "server" not in step:
            assert "answer" in reply, reply.get("crashed", json.dumps(reply))
        for name, path in step.get("save", {}).items():
            self.variables[name] = at_path(reply, path)

    async def _until(self, step: Mapping[str, Json]) -> Json:
        """The reply; with `until`, of the first repetition that is so."""
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            reply = await self.driver.do(step)
            if "until" not in step or difference(step["until"], reply, at="reply") is None:
                return reply
            assert asyncio.get_running_loop().time() < deadline_s, f"never {step['until']}: {reply}"
            await asyncio.sleep(0.05)


def filled(value: Json, variables: Mapping[str, Json], *, partly: bool = False) -> Json:
    """`value` with `$name` replaced: a text that is only that by the variable itself, parts of texts by its text."""
    if isinstance(value, str):
        if value.startswith("$") and value[1:] in variables:
            return variables[value[1:]]
        for name, text in variables.items():
            value = value.replace("${" + name + "}", str(text))
        assert partly or "${" not in value, f"no variable for {value!r}"
        return value
    if isinstance(value, Mapping):
        # Keys too: what is counted is named after the rpc.
        keys = [filled(key, variables, partly=partly) if "${" in key else key for key in value]
        return dict(zip(keys, filled(list(value.values()), variables, partly=partly), strict=True))
    if isinstance(value, list):
        return [filled(item, variables, partly=partly) for item in value]
    return value


def at_path(value: Json, path: str) -> Json:
    """The part at `answer.leases.0.leaseId`."""
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def difference(expected: Json, found: Json, *, at: str) -> str | None:
    """What is wrong with `found`, or None. Objects may have more fields; lists may not have more elements.

    An object with one of `RULES` (`{"$has": text}`, `{"$absent": true}`, …) is a rule instead.
    """
    if isinstance(expected, Mapping):
        rule = next((name for name in expected if name.startswith("$")), None)
        if rule is not None:
            return None if RULES[rule](expected[rule], found) else f"{at}: {found!r} is not {expected}"
        if not isinstance(found, Mapping):
            return f"{at}: {found!r} is no object"
        pairs = [(key, item, found.get(key, ABSENT)) for key, item in expected.items()]
        return first_difference((difference(item, seen, at=f"{at}.{key}") for key, item, seen in pairs))
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return f"{at}: {found!r} is not {len(expected)} elements"
        pairs = list(enumerate(zip(expected, found, strict=True)))
        return first_difference(difference(item, seen, at=f"{at}.{key}") for key, (item, seen) in pairs)
    return None if expected == found else f"{at}: {found!r} is not {expected!r}"


def first_difference(found: Iterator[str | None]) -> str | None:
    """The first problem."""
    return next((problem for problem in found if problem is not None), None)


def in_any_order(expected: Sequence[Json], found: Json) -> bool:
    """Whether each expected element is there, and nothing else."""
    left = list(found) if isinstance(found, list) else []
    for item in expected:
        match = next((seen for seen in left if difference(item, seen, at="") is None), ABSENT)
        if match is ABSENT:
            return False
        left.remove(match)
    return not left


ABSENT: Json = "(absent)"
RULES: Mapping[str, Any] = {
    "$has": lambda expected, found: isinstance(found, str) and expected in found,
    "$at_least": lambda expected, found: isinstance(found, int | float) and found >= expected,
    "$about": lambda expected, found: (
        isinstance(found, int | float) and math.isclose(expected, found, rel_tol=1e-6)
    ),
    "$absent": lambda _expected, found: found is ABSENT or found is None,
    "$any_order": in_any_order,
    "$has_element": lambda expected, found: isinstance(found, list) and expected in found,
    "$not": lambda expected, found: found is not ABSENT and found != expected,
}
