"""The two processes within a sandbox: one that runs the program under test, and the harness, which asks it.

Invariant: the program never shares memory, descriptors or an interpreter with its tests: the harness forks before it
reads them, hides its own memory, calls the program's functions by pipe, and gets plain values back. Only the harness
holds the descriptor of the verdict. Whatever the program does, the worst it can do is fail. Started by
`run`, with the number of that descriptor; standard library only.
"""

import builtins
import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

from astraflow_raas.sandbox import confinement, literals

_MAX_REPLY_BYTES = 2**20
_ERROR_CHARS = 300


class ProgramFailedError(Exception):
    """The program raised, ended or was too slow; `kind` says which."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def main() -> None:
    """Serve one order: {program, limits}, then {kind, …} with the tests; one JSON line of a result per test."""
    confinement.hide_memory()
    confinement.limit_resources(memory_mb=2048, cpu_s=600, file_mb=64)
    sys.set_int_max_str_digits(100_000)
    order = _read_message()
    _report({"ready": True})
    if order["kind"] == "stdio":
        for text in _read_message()["inputs"]:
            _report(_ran(order, text))
        return
    program = Program(order)
    tests = _read_message()
    try:
        program.load()
    except Exception as error:  # noqa: BLE001 - whatever the program raised is raised here
        _report(_failure(error))
        return
    if order["kind"] == "calls":
        for arguments in tests["inputs"]:
            _report(_called(program, order["name"], arguments))
    else:
        for source in tests["sources"]:
            _report(_checked(program, source, setup=tests["setup"], name=order["name"]))


def _called(program: "Program", name: str, arguments: list[Any]) -> dict[str, object]:
    try:
        return {"value": program.request({"call": name, "arguments": arguments})}
    except Exception as error:  # noqa: BLE001 - whatever the program raised is raised here
        return _failure(error)


def _failure(error: Exception) -> dict[str, object]:
    kind = error.kind if isinstance(error, ProgramFailedError) else "raised"
    return {"error": kind, "message": f"{type(error).__name__}: {error}"[:_ERROR_CHARS]}


def _checked(program: "Program", source: str, *, setup: str, name: str) -> dict[str, object]:
    """Run test code here, with stand-ins for the program's names."""
    names = program.stand_ins()
    try:
        # The task's own definitions win over names of the program, but for the function under test.
        exec(compile(setup, "setup", "exec"), names)  # noqa: S102 - code of the task, in a sandbox
        names |= {name: program.stand_in(name)} if name else {}
        exec(compile(source, "test", "exec"), names)  # noqa: S102 - the same
    except ProgramFailedError as error:
        return _failure(error)
    except AssertionError as error:
        return {"error": "wrong", "message": str(error)[:_ERROR_CHARS]}
    except BaseException as error:  # noqa: BLE001 - a test may raise anything, SystemExit included
        return {"error": "raised", "message": f"{type(error).__name__}: {error}"[:_ERROR_CHARS]}
    return {"value": True}


class Program:
    """The program under test in a process of its own, seen from the harness."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._test_s = order["test_s"]
        self._names: list[str] = []
        ours, theirs = os.pipe(), os.pipe()
        if os.fork() == 0:
            _become_program(order, requests=ours[0], replies=theirs[1])
        os.close(ours[0])
        os.close(theirs[1])
        self._requests, self._replies = ours[1], theirs[0]

    def load(self) -> None:
        """Wait until the program has been imported. Raises ProgramFailedError."""
        names = self._reply()
        self._names = [name for name in names if isinstance(name, str) and name.isidentifier()]

    def stand_ins(self) -> dict[str, object]:
        """What stands for the program's functions and classes. Never for a builtin or a module that tests use."""
        own = [name for name in self._names if not hasattr(builtins, name)]
        modules = {name: importlib.import_module(name) for name in own if name in sys.stdlib_module_names}
        return {name: modules.get(name) or self.stand_in(name) for name in own}

    def stand_in(self, name: str) -> "StandIn":
        """What stands for the program's value of that name."""
        return StandIn(self, {"name": name})

    def request(self, message: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """Ask the program's process; returns the encoded value. Raises ProgramFailedError."""
        try:
            _write_all(self._requests, json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ProgramFailedError("ended") from error
        return self._reply()

    def decoded(self, sent: Any) -> Any:  # noqa: ANN401 - any value
        """What the program sent, as a value of this process."""
        try:
            return literals.decode(sent, look_up=lambda number: StandIn(self, {"object": number}))
        except (literals.NotPlainError, RecursionError) as error:
            raise ProgramFailedError("garbage", str(error)[:_ERROR_CHARS]) from error

    def _reply(self) -> Any:  # noqa: ANN401 - JSON
        text, ends = bytearray(), time.monotonic() + self._test_s
        while not text.endswith(b"\n"):
            if not select.select([self._replies], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise ProgramFailedError("timeout", f"no answer within {self._test_s} s")
            chunk = os.read(self._replies, 65_536)
            if not chunk:
                raise ProgramFailedError("ended", "the program ended its process")
            text += chunk
            if len(text) > _MAX_REPLY_BYTES:
                raise ProgramFailedError("output_limit", f"a value has over {_MAX_REPLY_BYTES} bytes")
        try:
            reply = json.loads(text)
            value, error = reply.get("value"), reply.get("error")
        except (ValueError, RecursionError, AttributeError) as error:
            raise ProgramFailedError("garbage") from error
        if error is not None:
            _raise_as_here(str(error)[:50], str(reply.get("message"))[:_ERROR_CHARS])
        return value


def _raise_as_here(name: str, message: str) -> NoReturn:
    """Tests may expect the exception; never one that means something to the harness."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
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


def _become_program(order: dict[str, Any], *, requests: int, replies: int) -> NoReturn:
    """The other process: import the program, then answer; never returns."""
    code = 1
    try:
        os.dup2(requests, 10)
        os.dup2(replies, 11)
        _confine(order, keep=(10, 11))
        _answer(order["program"], os.fdopen(10, "rb"), os.fdopen(11, "wb", buffering=0))
        code = 0
    finally:
        os._exit(code)


def _confine(order: dict[str, Any], *, keep: tuple[int, ...] = ()) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        if number not in keep:
            os.dup2(null, number)
    for number in range(3, 256):
        if number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    confinement.limit_resources(memory_mb=order["memory_mb"], cpu_s=order["cpu_s"], file_mb=order["file_mb"])
    confinement.filter_calls(order["machine"])


def _answer(source: str, requests: Any, replies: Any) -> None:  # noqa: ANN401 - streams
    """Import the program, then do what the harness asks, one reply for each request."""
    solution = _Solution()

    def serve(action: Any) -> None:  # noqa: ANN401 - a function
        try:
            reply = {"value": action()}
        except BaseException as error:  # noqa: BLE001 - the program may raise anything
            reply = {"error": type(error).__name__, "message": str(error)[:_ERROR_CHARS]}
        replies.write(json.dumps(reply).encode() + b"\n")

    serve(lambda: solution.load(source))
    for line in requests:
        serve(lambda line=line: solution.perform(json.loads(line)))


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
    """Run the program as a script on `text`; its exit status and what it printed."""
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
            kind = "output_limit" if len(printed) > order["output_kb"] * 1024 else ""
    os.close(output[0])
    if not kind:
        kind = "" if _waited(pid, until=ends) else "timeout"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if kind:
        return {"error": kind}
    return {"printed": printed.decode(errors="replace")} if _STATUS.get(pid) == 0 else {"error": "raised"}


_STATUS: dict[int, int] = {}


def _waited(pid: int, *, until: float) -> bool:
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            _STATUS[pid] = status
            return True
        time.sleep(0.001)
    return False


def _become_script(order: dict[str, Any], *, source: int, output: int) -> NoReturn:
    code = 1
    try:
        os.dup2(source, 0)
        os.dup2(output, 1)
        _confine(order, keep=(0, 1))
        sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
        module = {"__name__": "__main__", "__builtins__": builtins}
        try:
            exec(compile(order["program"], "solution", "exec"), module)  # noqa: S102 - what the sandbox is for
            code = 0
        except SystemExit as ended:
            code = 0 if ended.code in (None, 0) else 1
        sys.stdout.flush()
    finally:
        os._exit(code)


def _read_message() -> Any:  # noqa: ANN401 - JSON
    """One message, and not a byte of the next: it must not be in this process when it forks."""
    size = int.from_bytes(_read_exactly(4), "big")
    return json.loads(_read_exactly(size))


def _read_exactly(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        chunk = os.read(0, size - len(parts))
        if not chunk:
            sys.exit(1)
        parts += chunk
    return bytes(parts)


def _write_all(number: int, text: bytes) -> None:
    while text:
        text = text[os.write(number, text) :]


def _report(result: dict[str, object]) -> None:
    _write_all(int(sys.argv[1]), json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    main()
