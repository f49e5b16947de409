"""The first process of a sandbox with a shell, and of the other one in which the task's tests run.

Invariant: what runs in the sandbox can neither read this process nor end it, for it is the first. In the sandbox of the
shell, whose root the policy may have changed, it never says what the policy earned. Standard library only; started by
`sandbox`, asked by frames on stdin, one answer each on stdout.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from astraflow_environment.terminal.carry import packed, unpack
from astraflow_kit.sandbox import confinement

_TESTS, _VERDICTS = Path("/tests"), Path("/logs/verifier")
_BASH = ("/bin/bash", "--noprofile", "--norc")
_CHUNK = 65_536
_LOOK_S = 0.05
_IDLE_S = 0.1
_MAX_ERROR = 300


class Output:
    """What a pipe brought: all of it is read, `limit` bytes are kept, of the beginning and of the end."""

    def __init__(self, descriptor: int, *, limit: int) -> None:
        self.descriptor = descriptor
        self._half = limit // 2
        self._head, self._tail, self._cut = bytearray(), bytearray(), 0

    def read(self) -> bool:
        """Take what is there; False at its end."""
        chunk = os.read(self.descriptor, _CHUNK)
        room = self._half - len(self._head)
        self._head += chunk[: max(room, 0)]
        self._tail += chunk[max(room, 0) :]
        self._cut += max(len(self._tail) - self._half, 0)
        del self._tail[: max(len(self._tail) - self._half, 0)]
        return bool(chunk)

    def text(self) -> str:
        """What is kept, with a note where something was left out."""
        note = f"\n… {self._cut} bytes left out …\n".encode() if self._cut else b""
        return (self._head + note + self._tail).decode(errors="replace")


class Shell:
    """A bash that stays: folder, variables and background programs live from one command to the next."""

    def __init__(self, *, folder: str, variables: Mapping[str, str], limits: Mapping[str, int]) -> None:
        self._processes = limits["RLIMIT_NPROC"]
        self._output, theirs = os.pipe()
        self._statuses, status = os.pipe()
        self._status = status
        self._process = _start(
            list(_BASH), folder=folder, variables=variables, limits=limits, output=theirs, keep=status
        )
        os.close(theirs)
        os.close(status)

    def run(self, command: str, *, seconds: float, limit: int) -> dict[str, Any]:
        """Run a command; `status` is None when it `ended` the shell or did not end in time (`late`)."""
        # eval, so that an open quote is an error of the command; its own fd is closed to what the command starts.
        line = (
            f"eval {shlex.quote(command)} </dev/null {self._status}>&-\nprintf '%d\\n' $? >&{self._status}\n"
        )
        output, until = Output(self._output, limit=limit), time.monotonic() + seconds
        found: dict[str, Any] = {"status": None, "late": False, "ended": False}
        if not _write(self._process, line.encode(errors="replace"), until=until):
            found["ended"] = True
        while not found["ended"]:
            ready = _ready([self._output, self._statuses], until=min(until, time.monotonic() + _LOOK_S))
            if time.monotonic() >= until:  # who floods is always ready
                found["late"] = True
                break
            if _num_threads() > self._processes:  # the limit of the kernel is none for root's
                found["ended"] = True
                break
            if self._statuses in ready:
                said = os.read(self._statuses, 64).split()
                found["ended"] = not said
                found["status"] = int(said[-1]) if said and said[-1].isdigit() else None
                break
            if self._output in ready:
                output.read()
        while _ready([self._output], until=0) and time.monotonic() < until and output.read():
            pass
        return found | {"output": output.text()}

    def close(self) -> None:
        """Forget it; whoever calls has killed it."""
        os.close(self._output)
        os.close(self._statuses)
        if self._process.stdin is not None:
            self._process.stdin.close()


class Room:
    """The sandbox as its owner asks for it."""

    def __init__(self) -> None:
        self._shell: Shell | None = None
        self._about: dict[str, Any] = {}

    def begin(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make the folders, and remember folder, variables and limits."""
        self._about = {name: order[name] for name in ("folder", "variables", "limits")}
        for scratch in (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")):
            scratch.mkdir(parents=True, exist_ok=True)
            scratch.chmod(0o1777)
        for folder in (order["folder"], order["variables"]["HOME"]):
            Path(folder).mkdir(parents=True, exist_ok=True)
        return {}

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run a command in the shell; one that is gone or too late is replaced the next time."""
        if self._shell is None:
            self._shell = Shell(**(self._about | {"folder": self._folder()}))
        found = self._shell.run(order["command"], seconds=order["seconds"], limit=order["limit"])
        if found["late"] or found["ended"]:
            self._end_all()
        return found

    def look(self) -> None:
        """Kill everything if it is too much; the next command finds its shell ended."""
        if self._shell is not None and _num_threads() > self._about["limits"]["RLIMIT_NPROC"]:
            _kill_all()

    def stop(self, _: dict[str, Any]) -> dict[str, Any]:
        """Kill everything."""
        self._end_all()
        return {}

    def export(self, send: Callable[[bytes], None]) -> dict[str, Any]:
        """Send what is in the work folder."""
        for chunk in packed(Path(self._about["folder"])):
            send(chunk)
        return {}

    def take(self, order: dict[str, Any], frames: Iterator[bytes]) -> dict[str, Any]:
        """Make the work folder that another sandbox sent."""
        unpack(Path(self._about["folder"]), frames, system=order["system"])
        return {}

    def grade(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run the tests, kill everything, and read the reward that they wrote."""
        _VERDICTS.mkdir(parents=True, exist_ok=True)
        read, theirs = os.pipe()
        command, folder = [*_BASH, str(_TESTS / "test.sh")], self._folder()
        variables, limits = self._about["variables"], self._about["limits"]
        child = _start(command, folder=folder, variables=variables, limits=limits, output=theirs)
        os.close(theirs)
        output, until = Output(read, limit=order["limit"]), time.monotonic() + order["seconds"]
        late = False
        while not late and child.poll() is None:
            # What test.sh left in the background may keep the pipe open, so its own end counts.
            if _ready([read], until=min(until, time.monotonic() + _LOOK_S)):
                output.read()
            late = time.monotonic() >= until or _num_threads() > limits["RLIMIT_NPROC"]
        while _ready([read], until=0) and time.monotonic() < until and output.read():
            pass
        self._end_all()
        os.close(read)
        return {"late": late, "status": child.returncode, "output": output.text(), "reward": _reward()}

    def _folder(self) -> str:
        folder: str = self._about["folder"]
        return folder if Path(folder).is_dir() else "/"

    def _end_all(self) -> None:
        _kill_all()
        if self._shell is not None:
            self._shell.close()
            self._shell = None


def _kill_all() -> None:
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _start(
    command: list[str],
    *,
    folder: str,
    variables: Mapping[str, str],
    limits: Mapping[str, int],
    output: int,
    keep: int | None = None,
) -> "subprocess.Popen[bytes]":
    def limited() -> None:
        os.nice(confinement.NICE)
        confinement.limit_resources(limits)
        confinement.filter_calls(os.uname().machine, may_start=True)

    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE if keep is not None else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=() if keep is None else (keep,),
        cwd=folder,
        env=dict(variables),
        preexec_fn=limited,
        start_new_session=True,
    )


def _ready(descriptors: list[int], *, until: float) -> list[int]:
    return select.select(descriptors, [], [], max(0.0, until - time.monotonic()))[0]


def _write(process: "subprocess.Popen[bytes]", text: bytes, *, until: float) -> bool:
    """Whether the shell took it all."""
    assert process.stdin is not None
    descriptor = process.stdin.fileno()
    try:
        while text:
            if not select.select([], [descriptor], [], max(0.0, until - time.monotonic()))[1]:
                return False
            text = text[os.write(descriptor, text[:4096]) :]
    except BrokenPipeError:
        return False
    return True


def _num_threads() -> int:
    """Of all processes, also those that ended and whose end nobody took."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - many times a second
        with suppress(FileNotFoundError):
            total += os.stat(f"/proc/{name}/task").st_nlink - 2  # noqa: PTH116 - the same
    return total


def _reward() -> str | None:
    """`reward.txt`, or what `reward.json` calls reward; None where there is neither."""
    try:
        if (_VERDICTS / "reward.txt").is_file():
            return (_VERDICTS / "reward.txt").read_text()[:64]
        return str(json.loads((_VERDICTS / "reward.json").read_text())["reward"])[:64]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main() -> None:
    """Answer until the owner is gone."""
    confinement.hide_memory()
    room, orders, answers = Room(), os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    with os.fdopen(orders, "rb", buffering=0) as incoming, os.fdopen(answers, "wb") as outgoing:
        while text := _order(incoming, room):
            order = json.loads(text)
            answer = _answered(room, order, incoming, outgoing)
            _send(outgoing, json.dumps({**answer, "number": order["number"]}).encode())
            outgoing.flush()
            _reap()


def _answered(room: Room, order: dict[str, Any], incoming: BinaryIO, outgoing: BinaryIO) -> dict[str, Any]:
    try:
        match order["do"]:
            case "export":
                try:
                    return room.export(lambda chunk: _send(outgoing, chunk))
                finally:
                    _send(outgoing, b"")
            case "take":
                frames = iter(lambda: _frame(incoming), b"")
                try:
                    return room.take(order, frames)
                finally:
                    deque(frames, maxlen=0)  # leave nothing of it to who reads next
            case action:
                answer: dict[str, Any] = getattr(room, action)(order)
                return answer
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}


def _order(incoming: BinaryIO, room: Room) -> bytes:
    """The next one. What runs in the background is looked at meanwhile."""
    while not _ready([incoming.fileno()], until=time.monotonic() + _IDLE_S):
        room.look()
    return _frame(incoming)


def _frame(stream: BinaryIO) -> bytes:
    return _exactly(stream, int.from_bytes(_exactly(stream, 4), "big"))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    """That many bytes of a stream without a buffer, fewer at its end."""
    found = bytearray()
    while len(found) < size and (part := stream.read(size - len(found))):
        found += part
    return bytes(found)


def _send(stream: BinaryIO, frame: bytes) -> None:
    stream.write(len(frame).to_bytes(4, "big") + frame)


def _reap() -> None:
    """Orphans are ours: take the ends of those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
