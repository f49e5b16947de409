"""The processes of the experiment, seen from outside: given orders, and what they say.

Invariant: every wait ends: with the event, with the process, or at the deadline. `experiment` owns them; its
processes end with the block.
"""

import json
import queue
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from astraflow.errors import DeadlineError, UnavailableError
from astraflow_bench.wan.links import Place
from astraflow_bench.wan.messages import Message
from astraflow_bench.wan.network import Network
from astraflow_kit.parent import python

_END_S = 20.0
_POLL_S = 0.5
_LOG_TAIL = 1500


class RoleProcesses:
    """Processes by name. Use as a context manager, in the main thread."""

    def __init__(self, network: Network, *, folder: Path, deadline_s: float) -> None:
        """Logs go to `folder`; nothing waits past `deadline_s` of the monotonic clock."""
        self._network = network
        self._folder = folder
        self._deadline_s = deadline_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._listeners: list[threading.Thread] = []
        self._events: queue.Queue[tuple[str, Message | None]] = queue.Queue()
        self._unheard: deque[tuple[str, Message]] = deque()

    def start(self, name: str, place: Place, module: str, **settings: Any) -> None:
        """Run a role's module there; its settings are its first order."""
        log = (self._folder / f"{name}.log").open("wb")
        process = self._network.start(
            place,
            *python(f"astraflow_bench.wan.{module}"),
            stdin=subprocess.PIPE,
            stderr=log,
        )
        log.close()
        self._processes[name] = process
        listener = threading.Thread(target=self._listen, args=(name, process), daemon=True)
        listener.start()
        self._listeners.append(listener)
        self.tell(name, **settings)

    def tell(self, name: str, **order: Any) -> None:
        """Give an order; does not wait."""
        stream = self._processes[name].stdin
        assert stream is not None
        try:
            stream.write(json.dumps(order).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:
            self._ended(name)

    def ask(self, name: str, event: str, **order: Any) -> Message:
        """Give an order and wait for what answers it."""
        self.tell(name, **order)
        return self.wait(name, event)

    def wait(self, name: str, event: str) -> Message:
        """The oldest unheard event of that kind; what others say meanwhile is kept for their turn."""
        for heard in self._unheard:
            if heard[0] == name and heard[1]["event"] == event:
                self._unheard.remove(heard)
                return heard[1]
        while True:
            who, message = self._next()
            if who == name and message["event"] == event:
                return message
            self._unheard.append((who, message))

    def next(self) -> tuple[str, Message]:
        """Whatever is said next, by whom."""
        return self._unheard.popleft() if self._unheard else self._next()

    def _next(self) -> tuple[str, Message]:
        while True:
            left = self._deadline_s - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    "the experiment did not end within its time limit; raise --time-limit or choose a smaller "
                    "--model-mb"
                )
            try:
                who, message = self._events.get(timeout=min(left, _POLL_S))
            except queue.Empty:
                continue
            if message is None:
                self._ended(who)
            else:
                return who, message

    def _ended(self, name: str) -> None:
        code = self._processes[name].wait(timeout=_END_S)
        log = (self._folder / f"{name}.log").read_text(errors="replace")[-_LOG_TAIL:]
        raise UnavailableError(f"the {name} ended with {code}; the end of its log: {log}")

    def _listen(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._events.put((name, json.loads(line)))
        self._events.put((name, None))

    def __enter__(self) -> "RoleProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for process, listener in zip(self._processes.values(), self._listeners, strict=True):
            process.wait(timeout=_END_S)
            listener.join(timeout=_END_S)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(BrokenPipeError):  # an order that it did not live to hear
                    stream.close()
