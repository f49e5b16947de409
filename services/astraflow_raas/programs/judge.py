"""The judge of a program: holds the tests, asks the program by two pipes, and says of each test whether it passed.

Invariant: the program is in another sandbox, so nothing of it is here but its answers, which are bounded, strictly
JSON, and become plain values of built-in types. Only the judge has the descriptor of the verdict. The tests are code of
the task, which is why the judge is in a sandbox too. Started by `run`; standard library only.
"""

import builtins
import importlib
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from astraflow_kit.sandbox import confinement
from astraflow_raas.programs import literals

_MAX_REPLY_BYTES = 2**20
_ERROR_CHARS = 300
_SIGNALS = (AssertionError, StopIteration, StopAsyncIteration)


class ProgramFailedError(Exception):
    """The program raised, ended or was too slow; `kind` says which."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def main() -> None:
    """Serve one order: {program, tests, …} on a line; then {started}, and a result per test, a line each."""
    verdict = os.dup(1)
    os.dup2(2, 1)  # what tests print is no verdict
    confinement.hide_memory()
    sys.set_int_max_str_digits(100_000)

    def report(result: Mapping[str, object]) -> None:
        _write_all(verdict, json.dumps(result).encode() + b"\n")

    order = json.loads(sys.stdin.buffer.readline())
    confinement.limit_resources(order["limits"])
    program = Program(order)
    report({"started": program.starts()})
    try:
        program.load(order["program"])
        for result in _JUDGES[order["kind"]](program, order):
            report(result)
    except ProgramFailedError as error:
        report(_failure(error))


def _failure(error: BaseException) -> dict[str, object]:
    kind = error.kind if isinstance(error, ProgramFailedError) else "raised"
    kind = "wrong" if isinstance(error, AssertionError) else kind
    return {"error": kind, "message": f"{type(error).__name__}: {error}"[:_ERROR_CHARS]}


def _judged(action: Callable[[], bool]) -> dict[str, object]:
    try:
        return {"value": action()}
    except BaseException as error:  # noqa: BLE001 - tests, and what they call, may raise anything, SystemExit included
        return _failure(error)


class Program:
    """The program under test, seen from the judge."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._requests, self._replies = map(
            os.dup, order["descriptors"]
        )  # `select` takes no number from 1024 on
        self._is_script = order["kind"] == "stdio"
        self._test_s = order["program"]["test_s"]
        # JSON may write a byte with six.
        self._most = _MAX_REPLY_BYTES + 6 * order["program"]["output_bytes"]
        self._names: list[str] = []

    def starts(self) -> bool:
        """Wait for its sandbox, whose own time `run` bounds; False when there was none."""
        try:
            return self._line(ends=math.inf) == b'{"ready": true}\n'
        except ProgramFailedError:
            return False

    def load(self, order: Mapping[str, Any]) -> None:
        """Hand it the program, and wait until it has been imported. Raises ProgramFailedError."""
        self._ask(order)
        if not self._is_script:
            try:
                names = self._reply()
            except ProgramFailedError:
                raise
            except Exception as error:
                raise ProgramFailedError("raised", f"{type(error).__name__}: {error}") from error
            self._names = [name for name in names if isinstance(name, str) and _is_own(name)]

    def stand_ins(self) -> dict[str, object]:
        """What stands for the program's functions and classes. Never for a builtin or a module that tests use."""
        own = [name for name in self._names if not hasattr(builtins, name)]
        modules = {name: importlib.import_module(name) for name in own if name in sys.stdlib_module_names}
        return {name: modules.get(name) or self.stand_in(name) for name in own}

    def stand_in(self, name: str) -> "StandIn":
        """What stands for the program's value of that name."""
        return StandIn(self, {"name": name})

    def request(self, message: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Ask the program; returns the encoded value. Raises ProgramFailedError."""
        self._ask(message)
        return self._reply()

    def decoded(self, sent: Any) -> Any:  # noqa: ANN401 - any value
        """What the program sent, as a value of this process."""
        try:
            return literals.decode(sent, look_up=lambda number: StandIn(self, {"object": number}))
        except (literals.NotPlainError, RecursionError) as error:
            raise ProgramFailedError("garbage", str(error)[:_ERROR_CHARS]) from error

    def _ask(self, message: Mapping[str, Any]) -> None:
        try:
            _write_all(self._requests, json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ProgramFailedError("ended", "the program ended its process") from error

    def _reply(self) -> Any:  # noqa: ANN401 - JSON
        # A script has the time of a test for itself, and its end is seen by the process beside it.
        text = self._line(ends=math.inf if self._is_script else time.monotonic() + self._test_s)
        try:
            reply = json.loads(text, parse_constant=_refuse)
            value, error = reply.get("value"), reply.get("error")
        except (ValueError, RecursionError, AttributeError) as error:
            raise ProgramFailedError("garbage") from error
        if error is not None:
            _raise_as_here(str(error)[:50], str(reply.get("message"))[:_ERROR_CHARS])
        return value

    def _line(self, *, ends: float) -> bytes:
        text = bytearray()
        while not text.endswith(b"\n"):
            left = None if ends == math.inf else max(0.0, ends - time.monotonic())
            if not select.select([self._replies], [], [], left)[0]:
                raise ProgramFailedError("timeout", f"no answer within {self._test_s} s")
            chunk = os.read(self._replies, 65_536)
            if not chunk:
                raise ProgramFailedError("ended", "the program ended its process")
            text += chunk
            if len(text) > self._most:
                raise ProgramFailedError("output_limit", f"a value has over {self._most} bytes")
        return bytes(text)


def _is_own(name: str) -> bool:
    """Whether a program may define it; what the interpreter looks up by its name, as `__builtins__`, it may not."""
    return name.isidentifier() and not name.startswith("__")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _raise_as_here(name: str, message: str) -> NoReturn:
    """Tests may expect the exception; never one that means something to the judge, or to a loop of theirs."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _SIGNALS):
        try:
            raise kind(message)
        except TypeError as error:  # one that needs more than a message
            raise ProgramFailedError("raised", f"{name}: {message}") from error
    raise ProgramFailedError("raised", f"{name}: {message}")


class StandIn:
    """A value that stays in the program's process; equal to nothing but itself."""

    def __init__(self, program: Program, where: dict[str, Any]) -> None:
        self.__program, self.__where = program, where

    def __call__(self, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - any value
        sent = {
            "arguments": [_sent(item) for item in arguments],
            "named": {k: _sent(v) for k, v in named.items()},
        }
        return self.__program.decoded(self.__program.request({**self.__where, **sent, "do": "call"}))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any value
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__program.decoded(
            self.__program.request({**self.__where, "do": "get", "attribute": name})
        )

    def __iter__(self) -> Any:  # noqa: ANN401 - any value
        return iter(self.__program.decoded(self.__program.request({**self.__where, "do": "list"})))

    def _where(self) -> dict[str, Any]:
        return self.__where


def _sent(value: object) -> Any:  # noqa: ANN401 - JSON
    """Encode an argument; a stand-in goes back as what it stands for."""
    return literals.encode(value, keep=_only_stand_ins)


def _only_stand_ins(value: object) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, StandIn):
        return value._where()
    raise TypeError(f"a test passes a {type(value).__name__}, which cannot travel to the program")


def _checks(program: Program, order: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    """Run test code here, with stand-ins for the program's names."""
    tests, name = order["tests"], order["name"]

    def passes(source: str) -> bool:
        names = program.stand_ins()
        # The task's own definitions win over names of the program, but for the function under test.
        exec(compile(tests["setup"], "setup", "exec"), names)  # noqa: S102 - code of the task, in a sandbox
        names |= {name: program.stand_in(name)} if name else {}
        exec(compile(source, "test", "exec"), names)  # noqa: S102 - the same
        return True

    return (_judged(partial(passes, source)) for source in tests["sources"])


def _calls(program: Program, order: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    name, tests = order["name"], order["tests"]

    def passes(arguments: list[Any], wanted: object) -> bool:
        sent = program.request({"call": name, "arguments": arguments})
        value = literals.decode(sent, look_up=lambda _: object())
        return is_same(value, wanted, tolerance=order["tolerance"])

    pairs = zip(tests["inputs"], tests["results"], strict=True)
    return (_judged(partial(passes, *pair)) for pair in pairs)


def _scripts(program: Program, order: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    tests = order["tests"]

    def passes(text: str, wanted: str) -> bool:
        found = program.request({"input": text})
        if not isinstance(found, dict) or not isinstance(found.get("printed"), str):
            kind = found.get("error") if isinstance(found, dict) else "garbage"
            raise ProgramFailedError(str(kind)[:50])
        return _is_same_text(found["printed"], wanted, tolerance=order["tolerance"])

    pairs = zip(tests["inputs"], tests["results"], strict=True)
    return (_judged(partial(passes, *pair)) for pair in pairs)


_JUDGES = {"checks": _checks, "calls": _calls, "stdio": _scripts}


def is_same(value: object, wanted: object, *, tolerance: float) -> bool:
    """Equal, sequences of either kind alike, floats within the tolerance."""
    if isinstance(value, list | tuple) and isinstance(wanted, list | tuple):
        pairs = zip(value, wanted, strict=False)
        return len(value) == len(wanted) and all(is_same(*pair, tolerance=tolerance) for pair in pairs)
    if isinstance(value, dict) and isinstance(wanted, dict):
        named = {str(key): item for key, item in value.items()}  # the task's data is JSON
        return named.keys() == wanted.keys() and all(
            is_same(named[key], wanted[key], tolerance=tolerance) for key in wanted
        )
    if isinstance(value, float | int) and isinstance(wanted, float):
        return math.isclose(value, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return value == wanted


def _is_same_text(printed: str, wanted: str, *, tolerance: float) -> bool:
    """Word by word, line by line."""
    ours, theirs = ([line.split() for line in text.rstrip().split("\n")] for text in (printed, wanted))
    return len(ours) == len(theirs) and all(
        len(one) == len(other)
        and all(_is_same_word(*pair, tolerance) for pair in zip(one, other, strict=True))
        for one, other in zip(ours, theirs, strict=True)
    )


def _is_same_word(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    try:
        return "." in theirs and is_same(float(ours), float(theirs), tolerance=tolerance)
    except ValueError:
        return False


def _write_all(number: int, text: bytes) -> None:
    while text:
        text = text[os.write(number, text) :]
