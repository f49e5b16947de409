"""The program under test, in a sandbox of its own: imported, then asked by lines on descriptor 0, answering on 1.

Invariant: no test, expected value or verdict is in this sandbox, and no descriptor but 0, 1 and 2 (/dev/null); the
judge, in another, asks for one thing at a time. Whatever the program does to what is here, it can only answer, or fail
to. Standard library only.
"""

import builtins
import contextlib
import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from astraflow_kit.sandbox import confinement
from astraflow_raas.programs import literals

_ERROR_CHARS = 300


def main() -> None:
    """Say that this is ready, take the order, and do what it says until nobody asks any more."""
    confinement.hide_memory()
    confinement.close_descriptors(3)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.set_int_max_str_digits(100_000)
    _reply({"ready": True})
    order = json.loads(_requests.readline())
    if order["kind"] == "stdio":
        for line in _requests:
            _reply({"value": _ran(order, json.loads(line)["input"])})
        return
    # What the program prints is nobody's: it would mix with the answers.
    sys.stdin, sys.stdout = io.StringIO(), os.fdopen(2, "w", closefd=False)
    _confine(order)
    solution = _Solution()
    _serve(partial(solution.load, order["program"]))
    for line in _requests:
        _serve(partial(solution.perform, json.loads(line)))


_requests = os.fdopen(0, "rb", closefd=False)


def _reply(message: Mapping[str, object]) -> None:
    _write_all(1, json.dumps(message).encode() + b"\n")


def _serve(action: Callable[[], object]) -> None:
    try:
        reply = {"value": action()}
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        reply = {"error": type(error).__name__, "message": str(error)[:_ERROR_CHARS]}
    _reply(reply)


def _confine(order: Mapping[str, Any]) -> None:
    os.nice(confinement.NICE)
    confinement.limit_resources(order["limits"])
    confinement.filter_calls(order["machine"], may_start=False)


class _Solution:
    """The imported program, and the values that stay here because they are no plain ones."""

    def __init__(self) -> None:
        self._module: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
        self._kept: list[object] = []

    def load(self, source: str) -> list[str]:
        """Import it; returns the names that it defines."""
        exec(compile(source, "solution", "exec"), self._module)  # noqa: S102 - what the sandbox is for
        return [name for name in self._module if not name.startswith("__")]

    def perform(self, message: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Call a function, read an attribute, or list what a value yields."""
        if "call" in message:
            owner, _, method = message["call"].rpartition(".")
            function = getattr(self._module[owner](), method) if owner else self._module[method]
            return self._encoded(_listed(function(*message["arguments"])))
        value = self._look_up(message)
        if message["do"] == "list":
            return self._encoded(list(value))
        if message["do"] == "get":
            return self._encoded(getattr(value, message["attribute"]))
        given = [literals.decode(item, look_up=self._look_up) for item in message["arguments"]]
        named = {
            name: literals.decode(item, look_up=self._look_up) for name, item in message["named"].items()
        }
        return self._encoded(value(*given, **named))

    def _encoded(self, value: Any) -> Any:  # noqa: ANN401 - any value
        return literals.encode(value.tolist() if hasattr(value, "tolist") else value, keep=self._keep)

    def _keep(self, value: object) -> int:
        self._kept.append(value)
        return len(self._kept) - 1

    def _look_up(self, where: dict[str, Any]) -> Any:  # noqa: ANN401 - any value
        return self._module[where["name"]] if "name" in where else self._kept[where["object"]]


def _listed(value: Any) -> Any:  # noqa: ANN401 - any value
    """What a call returns leaves the sandbox, so iterators are run here."""
    return list(value) if hasattr(value, "__next__") else value


def _ran(order: dict[str, Any], text: str) -> dict[str, object]:
    """Run the program as a script on `text`, in a process of its own; what it printed, if it ended with status 0."""
    source, output = os.memfd_create("stdin"), os.pipe()
    _write_all(source, text.encode())
    os.lseek(source, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        _become_script(order, source=source, output=output[1])
    os.close(source)
    os.close(output[1])
    printed, ends = bytearray(), time.monotonic() + order["test_s"]
    kind = ""
    while not kind:
        if not select.select([output[0]], [], [], max(0.0, ends - time.monotonic()))[0]:
            kind = "timeout"
        elif not (chunk := os.read(output[0], 65_536)):
            break
        else:
            printed += chunk
            kind = "output_limit" if len(printed) > order["output_bytes"] else ""
    os.close(output[0])
    status = None if kind else _status_of(pid, until=ends)
    if status is None:
        os.kill(pid, signal.SIGKILL)  # nobody has taken its end: the pid is still its own
        os.waitpid(pid, 0)
        return {"error": kind or "timeout"}
    return {"printed": printed.decode(errors="replace")} if status == 0 else {"error": "raised"}


def _status_of(pid: int, *, until: float) -> int | None:
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.001)
    return None


def _become_script(order: dict[str, Any], *, source: int, output: int) -> NoReturn:
    code = 1
    try:
        os.dup2(source, 0)
        os.dup2(output, 1)
        confinement.close_descriptors(3)
        _confine(order)
        sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
        module = {"__name__": "__main__", "__builtins__": builtins}
        try:
            exec(compile(order["program"], "solution", "exec"), module)  # noqa: S102 - what the sandbox is for
            code = 0
        except SystemExit as ended:
            code = 0 if ended.code in (None, 0) else 1
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
    finally:
        os._exit(code)


def _write_all(number: int, text: bytes) -> None:
    while text:
        text = text[os.write(number, text) :]
