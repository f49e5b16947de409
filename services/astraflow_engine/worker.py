"""The one thread that owns the model: it alternates between commands from other threads and passes of the
core.

Invariant: the core is touched by this thread only; every future handed out is resolved, with a completion,
an answer or an error, even when the thread fails or stops; commands take effect between passes, never inside
one. The HTTP handlers call it; the process ends when the thread fails, so that a supervisor sees it.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from astraflow_engine.core import EngineCore
from astraflow_engine.errors import EngineUnavailable, QueueFull
from astraflow_engine.requests import Completion, GenerateRequest, PauseMode
from astraflow_kit.clock import Clock
from astraflow_kit.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

_IDLE_WAIT_S = 0.5
# Control commands (pause, swap, stats, …) that may queue beside generation requests.
_CONTROL_HEADROOM = 256


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do on the thread, and how to tell its sender that it will not be done."""

    act: Callable[[], None]
    refuse: Callable[[Exception], None]


class EngineWorker:
    """Runs an `EngineCore`. All methods are thread-safe; all but `stop` return at once."""

    def __init__(self, core: EngineCore, *, max_in_flight: int, clock: Clock) -> None:
        self.end: Future[None] = Future()
        """Resolved when the thread is over and has answered every caller: None after `stop`, else its error."""
        self._core = core
        self._clock = clock
        self._max_in_flight = max_in_flight
        self._commands: queue.Queue[_Command] = queue.Queue(max_in_flight + _CONTROL_HEADROOM)
        self._completions: dict[str, Future[Completion]] = {}
        self._stopping = threading.Event()
        self._closed = threading.Event()
        self._beat_s = clock.monotonic_s()
        self._thread = threading.Thread(target=self._main, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, *, deadline_s: float) -> bool:
        """Fail what is in progress and end the thread; whether it ended within `deadline_s`. Idempotent."""
        self._stopping.set()
        with suppress(queue.Full):
            # An idle thread waits for a command; any will do.
            self._commands.put_nowait(_Command(lambda: None, lambda error: None))
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """Seconds since the thread last finished a pass or an idle wait."""
        return self._clock.monotonic_s() - self._beat_s

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Generate one sequence. The future raises QueueFull, InvalidRequest or EngineUnavailable."""
        completion: Future[Completion] = Future()

        def accept() -> None:
            if not completion.cancelled():
                self._core.submit(request)
                self._completions[request.rid] = completion

        if self._commands.qsize() >= self._max_in_flight:
            completion.set_exception(_full(self._max_in_flight))
        else:
            self._post(accept, completion)
        return completion

    def call(self, run: Callable[[EngineCore], T]) -> Future[T]:
        """Run something on the core between passes, in the order of calls; its result or error is the
        future's."""
        answer: Future[T] = Future()
        self._post(lambda: _resolve(answer, run(self._core)), answer)
        return answer

    def pause(self, mode: PauseMode) -> Future[int]:
        """Pause between passes; the future gives the number of requests that ended by it."""
        return self.call(lambda core: self._deliver(core.pause(mode)))

    def abort(self, matches: Callable[[GenerateRequest], bool]) -> Future[int]:
        """End matching requests between passes; the future gives their number."""
        return self.call(lambda core: self._deliver(core.abort(matches)))

    def _post(self, act: Callable[[], None], future: Future[T]) -> None:
        try:
            self._commands.put_nowait(_Command(act, lambda error: _reject(future, error)))
        except queue.Full:
            _reject(future, _full(self._commands.maxsize))
        if self._closed.is_set():
            # The thread may have emptied the queue before this came: nobody else would answer it.
            self._refuse_commands()

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping.is_set():
                    self._iterate()
        except Exception as error:
            log.error("engine.failed", exc_info=error)
            self._refuse_all()
            _reject(self.end, error)
        else:
            self._refuse_all()
            _resolve(self.end, None)

    def _refuse_all(self) -> None:
        self._closed.set()
        self._refuse_commands()
        for future in self._completions.values():
            _reject(future, _stopped())

    def _iterate(self) -> None:
        self._run_commands(wait=not self._core.has_work)
        self._deliver(self._core.step())
        self._beat_s = self._clock.monotonic_s()

    def _run_commands(self, *, wait: bool) -> None:
        try:
            command = self._commands.get(block=wait, timeout=_IDLE_WAIT_S)
            while True:
                self._run_command(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _run_command(self, command: _Command) -> None:
        try:
            command.act()
        except Exception as error:  # noqa: BLE001 - the error belongs to whoever sent the command
            command.refuse(error)

    def _deliver(self, completions: Iterable[Completion]) -> int:
        num_delivered = 0
        for completion in completions:
            _resolve(self._completions.pop(completion.request.rid), completion)
            num_delivered += 1
        return num_delivered

    def _refuse_commands(self) -> None:
        while True:
            try:
                self._commands.get_nowait().refuse(_stopped())
            except queue.Empty:
                return


def _resolve(future: Future[T], value: T) -> None:
    try:
        future.set_result(value)
    except InvalidStateError:
        # The caller stopped waiting and cancelled: nobody is left to tell.
        log.debug("answer.unwanted")


def _reject(future: Future[T], error: Exception) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        log.debug("answer.unwanted")


def _full(limit: int) -> QueueFull:
    return QueueFull(
        f"the request queue is full: {limit} requests are not yet taken in; "
        "send it again later or raise --max-queued-requests"
    )


def _stopped() -> EngineUnavailable:
    return EngineUnavailable("the engine has stopped; send it to another engine, or restart this one")
