"""What a trainer is doing, told by the training thread and read by the servicer.

Invariant: one writer (the training thread), any number of readers in the event loop; readers get copies and
are woken through the loop, so that neither side ever waits for the other. Metrics of all finished steps are
kept: a few hundred bytes each.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

__all__ = ["Phase", "Progress", "State", "StepRecord"]


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
    fraction: float = 0.0
    """How far a long phase has come, in [0, 1]."""
    step: int = 0
    version: int | None = None
    trainer_epoch: int = 0


@dataclass
class _Clock:
    first_wait_at_s: float | None = None
    waited_s: float = 0.0
    waiting_since_s: float | None = None


@dataclass
class Progress:
    """Shared between the training thread and the event loop."""

    _state: State = field(default_factory=State)
    _records: list[StepRecord] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _clock: _Clock = field(default_factory=_Clock)
    _wakers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=set)

    @property
    def state(self) -> State:
        """The current snapshot."""
        with self._lock:
            return self._state

    def starting(self, waiting_for: str, *, fraction: float = 0.0) -> None:
        """Say what the start-up is busy with, and how far it is."""
        self._set(phase=Phase.STARTING, waiting_for=waiting_for, fraction=fraction)

    def claimed(self, *, epoch: int, step: int, version: int | None) -> None:
        """Record where the trainer goes on."""
        self._set(trainer_epoch=epoch, step=step, version=version, fraction=1.0)

    def waiting(self, reason: str) -> None:
        """Start, or go on, waiting for `reason`."""
        now = time.monotonic()
        with self._lock:
            if self._clock.first_wait_at_s is None:
                self._clock.first_wait_at_s = now
            if self._clock.waiting_since_s is None:
                self._clock.waiting_since_s = now
        self._set(phase=Phase.WAITING, waiting_for=reason)

    def training(self) -> None:
        """The wait is over."""
        now = time.monotonic()
        with self._lock:
            if self._clock.waiting_since_s is not None:
                self._clock.waited_s += now - self._clock.waiting_since_s
                self._clock.waiting_since_s = None
        self._set(phase=Phase.TRAINING, waiting_for="")

    def stepped(self, record: StepRecord) -> None:
        """Record a finished step."""
        with self._lock:
            self._records.append(record)
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
            if self._clock.first_wait_at_s is None:
                return 0.0
            now = time.monotonic()
            since = self._clock.waiting_since_s
            waited = self._clock.waited_s + (now - since if since is not None else 0.0)
            return min(1.0, waited / max(1e-9, now - self._clock.first_wait_at_s))

    def records_after(self, step: int) -> list[StepRecord]:
        """Finished steps after `step`, in order."""
        with self._lock:
            return [record for record in self._records if record.step > step]

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
