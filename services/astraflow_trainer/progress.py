"""What a trainer is doing, reported by the training thread and read by the servicer.

Invariant: one writer (the training thread), any number of readers in the event loop; readers get copies and
are woken through the loop, so that neither side ever waits for the other. Metrics of the newest finished steps are
kept, about 4 KB each.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

from astraflow_trainer.controls import PAUSED

KEPT_RECORDS = 256


class Phase(Enum):
    """What a trainer is doing."""

    STARTING = "starting"
    WAITING = "waiting"
    TRAINING = "training"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class StepRecord:
    """One finished step."""

    step: int
    version: int | None
    """Version the step publishes; None when a guard skipped it."""
    finished_at_s: float
    """Wall clock, seconds since the epoch."""
    wait_s: float
    train_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class State:
    """A consistent snapshot of the trainer."""

    phase: Phase = Phase.STARTING
    waiting_for: str = ""
    """Slug of what it waits for; empty when it works."""
    fraction: float | None = None
    """How far a long phase has come, in [0, 1]; None where nobody can tell."""
    detail: str = ""
    """What the start-up is busy with, for people."""
    store_wait: str = ""
    """Slug of what the weight store lacks, also while training goes on; empty when it lacks nothing."""
    store_detail: str = ""
    hung: str = ""
    """What a training thread that stands still was in the middle of; empty while it moves."""
    step: int = 0
    version: int | None = None
    trainer_epoch: int = 0
    durable_step: int = 0
    """Last step that a durable checkpoint covers."""
    learning_rate: float = 0.0
    """Peak of the next step."""


@dataclass
class _Clock:
    """Time waited since the first wait; pauses are cut out of both."""

    first_wait_at_s: float | None = None
    waited_s: float = 0.0
    waiting_since_s: float | None = None
    paused_since_s: float | None = None

    def wait(self, now_s: float) -> None:
        self._end_pause(now_s)
        if self.first_wait_at_s is None:
            self.first_wait_at_s = now_s
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def work(self, now_s: float) -> None:
        self._end_pause(now_s)
        if self.waiting_since_s is not None:
            self.waited_s += now_s - self.waiting_since_s
            self.waiting_since_s = None

    def pause(self, now_s: float) -> None:
        if self.paused_since_s is None:
            self.work(now_s)
            self.paused_since_s = now_s

    def wait_fraction(self, now_s: float) -> float:
        if self.first_wait_at_s is None:
            return 0.0
        until_s = now_s if self.paused_since_s is None else self.paused_since_s
        waiting_s = until_s - self.waiting_since_s if self.waiting_since_s is not None else 0.0
        return min(1.0, (self.waited_s + waiting_s) / max(1e-9, until_s - self.first_wait_at_s))

    def _end_pause(self, now_s: float) -> None:
        if self.paused_since_s is not None and self.first_wait_at_s is not None:
            self.first_wait_at_s += now_s - self.paused_since_s
        self.paused_since_s = None


@dataclass
class Progress:
    """Shared between the training thread and the event loop."""

    on_step: Callable[[StepRecord], None] = lambda _: None
    """Called by the training thread with each finished step."""
    _state: State = field(default_factory=State)
    _records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=KEPT_RECORDS))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _clock: _Clock = field(default_factory=_Clock)
    num_moves: int = 0
    """Grows whenever the thread that computes gets on."""
    computing_thread: int | None = None
    """Thread that computes now, which then moves again and again."""
    _wakers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=set)

    @property
    def state(self) -> State:
        """The current snapshot."""
        with self._lock:
            return self._state

    def starting(self, waiting_for: str, *, detail: str, fraction: float | None = None) -> None:
        """Say what the start-up is busy with, and how far it is."""
        self._set(phase=Phase.STARTING, waiting_for=waiting_for, detail=detail, fraction=fraction)

    def store_lacks(self, wait: str, detail: str) -> None:
        """Say what the weight store lacks; two empty texts, that it lacks nothing."""
        self._set(store_wait=wait, store_detail=detail)

    def claimed(self, *, epoch: int, step: int, version: int | None) -> None:
        """Record where the trainer goes on."""
        self._set(trainer_epoch=epoch, step=step, version=version, fraction=1.0, detail="")

    def resumed(self, *, durable_step: int, learning_rate: float) -> None:
        """Record what the loop starts from."""
        self._set(durable_step=durable_step, learning_rate=learning_rate)

    def waiting(self, reason: str) -> None:
        """Start, or go on, waiting for `reason`; a pause is nobody's fault and is not counted."""
        with self._lock:
            clock_turns = self._clock.pause if reason == PAUSED else self._clock.wait
            clock_turns(time.monotonic())
        self._set(phase=Phase.WAITING, waiting_for=reason)

    def training(self) -> None:
        """The wait is over."""
        with self._lock:
            self._clock.work(time.monotonic())
        self._set(phase=Phase.TRAINING, waiting_for="")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In the block this thread waits for nobody but the other ranks, and says `moved` again and again."""
        self.moved()
        self.computing_thread = threading.get_ident()
        try:
            yield
        finally:
            self.computing_thread = None

    def moved(self) -> None:
        """A micro-batch is begun; called by the training thread alone."""
        self.num_moves += 1

    def hangs(self, where: str) -> None:
        """Say what the training thread stands still in; empty once it moves. Called by the event loop."""
        if where != self.state.hung:
            self._set(hung=where)

    def durable(self, step: int) -> None:
        """Record that a durable checkpoint covers `step`."""
        self._set(durable_step=step)

    def learning_rate(self, peak: float) -> None:
        """Record another peak learning rate."""
        self._set(learning_rate=peak)

    def stepped(self, record: StepRecord) -> None:
        """Record a finished step."""
        with self._lock:
            self._records.append(record)
        self.on_step(record)
        self._set(step=record.step)

    def published(self, version: int) -> None:
        """Record that `version` is announced."""
        self._set(version=version)

    def ended(self, phase: Phase) -> None:
        """Record that training stops, or is finished."""
        self._set(phase=phase, waiting_for="")

    def wait_fraction(self) -> float:
        """Share of the time since the first wait that was spent waiting, in [0, 1]."""
        with self._lock:
            return self._clock.wait_fraction(time.monotonic())

    def records_after(self, step: int) -> list[StepRecord]:
        """Finished steps after `step`, in order; of older ones than the last KEPT_RECORDS nothing is left."""
        with self._lock:
            return [record for record in self._records if record.step > step]

    @property
    def last_record(self) -> StepRecord | None:
        """The newest finished step of this process."""
        with self._lock:
            return self._records[-1] if self._records else None

    async def changed(self, *, timeout_s: float) -> None:
        """Return at the next change, or after `timeout_s`."""
        waker = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._wakers.add(waker)
        try:
            await asyncio.wait_for(waker[1].wait(), timeout_s)
        except TimeoutError:
            return
        finally:
            with self._lock:
                self._wakers.discard(waker)

    def _set(self, **changes: object) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)  # type: ignore[arg-type]
            wakers = list(self._wakers)
        for loop, event in wakers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)
