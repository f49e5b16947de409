"""What operators ask of a running trainer: stop, pause, checkpoint, learning rate.

Invariant: rpcs only ask, the training thread only acts, between two steps; an answer is given when the thing is
done and durable, and whoever waits is answered at the end at the latest. The servicer asks; `RankBatches` takes
the orders on the first rank and tells the others; the loop carries them out.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from astraflow.errors import AstraflowError, PreconditionError

PAUSED = "paused"
Answer = TypeVar("Answer")

_PAUSE_POLL_S = 2.0  # how often waiting is reported while paused, so that other ranks do not wait in silence


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What to do before the next step."""

    stop: bool = False
    checkpoint: bool = False
    """One that somebody waits for."""
    checkpoint_due: bool = False
    """One that nobody waits for."""
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class RateChange:
    """A learning rate that is in force and durable."""

    first_step: int
    previous: float


class Controls:
    """Between any number of asking threads (first half) and one training thread (from `at` on)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stop = False
        self._ended = False
        self.pause_reason: str | None = None
        """Why a pause was asked for; None when none is."""
        self._checkpoints: list[Future[int]] = []
        self._checkpoint_due = False
        self._rates: list[tuple[float, Future[RateChange]]] = []
        self._refusal = "the trainer has not begun to train; ask Status what it waits for, then ask again"
        self._last_step = 0
        self._replaying = False

    def stop_after_step(self) -> int:
        """Ask for an end after the step in hand; returns the last step that will be taken."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
            return self._last_step

    def pause(self, reason: str) -> int:
        """Ask for a pause after the step in hand; returns that step. Raises PreconditionError."""
        with self._changed:
            if self._stop or self._ended:
                raise PreconditionError("the trainer is stopping; it takes no further step to pause before")
            self.pause_reason = reason
            self._changed.notify_all()
            return self._last_step

    def resume(self) -> int:
        """End a pause; returns the last step taken."""
        with self._changed:
            self.pause_reason = None
            self._changed.notify_all()
            return self._last_step

    def checkpoint(self) -> Future[int]:
        """Ask for a durable checkpoint; the future holds its step. Raises PreconditionError."""
        asked: Future[int] = Future()
        with self._changed:
            self._require_running()
            self._checkpoints.append(asked)
            self._changed.notify_all()
        return asked

    def set_learning_rate(self, peak: float) -> Future[RateChange]:
        """Ask for another peak learning rate. Raises PreconditionError."""
        asked: Future[RateChange] = Future()
        with self._changed:
            self._require_running()
            self._rates.append((peak, asked))
            self._changed.notify_all()
        return asked

    def at(self, step: int, *, replaying: bool = False) -> None:
        """`step` was the last one taken. While replaying, the learning rate stays what it was then."""
        with self._changed:
            # After a failure that a new claim mends, training goes on; a wish to stop outlives it.
            self._refusal, self._ended = "", False
            self._last_step, self._replaying = step, replaying

    def checkpoint_due(self) -> None:
        """The last checkpoint is too old: ask for another, which nobody waits for."""
        with self._changed:
            self._checkpoint_due = True

    def begin(self, step: int) -> bool:
        """Take `step` in hand, unless something was asked first: then its batch waits, bound as it is."""
        with self._changed:
            if self.pause_reason is not None or self._orders() is not None:
                return False
            self._last_step = step
            return True

    def interrupts(self) -> bool:
        """Whether waiting for a batch should end because something was asked."""
        with self._changed:
            return self.pause_reason is not None or self._orders() is not None

    def take(self, *, waiting: Callable[[str], None]) -> Orders | None:
        """What to do next, None to go on training. Blocks while paused, telling `waiting` why."""
        while True:
            with self._changed:
                orders = self._orders()
                if orders is not None or self.pause_reason is None:
                    return orders
            waiting(PAUSED)
            with self._changed:
                self._changed.wait_for(
                    lambda: self.pause_reason is None or self._orders() is not None, _PAUSE_POLL_S
                )

    def checkpoint_begun(self) -> None:
        """One that was due is under way."""
        with self._changed:
            self._checkpoint_due = False

    def checkpointed(self, step: int) -> None:
        """A checkpoint of `step`, the last step taken, is durable."""
        with self._changed:
            asked, self._checkpoints = self._checkpoints, []
        _answer(asked, lambda future: future.set_result(step))

    def learning_rate_set(self, peak: float, change: RateChange) -> None:
        """`peak` is in force and durable; wishes for other rates stay."""
        with self._changed:
            asked = [future for wanted, future in self._rates if wanted == peak]
            self._rates = [(wanted, future) for wanted, future in self._rates if wanted != peak]
        _answer(asked, lambda future: future.set_result(change))

    def ended(self, error: AstraflowError) -> None:
        """Training is over: whoever still waits gets `error`, and whoever asks from now on hears why."""
        with self._changed:
            self._ended, self._refusal = True, error.message
            checkpoints, self._checkpoints = self._checkpoints, []
            rates, self._rates = [future for _, future in self._rates], []
        _answer(checkpoints, lambda future: future.set_exception(error))
        _answer(rates, lambda future: future.set_exception(error))

    def _orders(self) -> Orders | None:
        rate = self._rates[0][0] if self._rates and not self._replaying else None
        orders = Orders(
            stop=self._stop,
            checkpoint=bool(self._checkpoints),
            checkpoint_due=self._checkpoint_due,
            learning_rate=rate,
        )
        return None if orders == Orders() else orders

    def _require_running(self) -> None:
        if self._refusal:
            raise PreconditionError(self._refusal)


def _answer(asked: list[Future[Answer]], give: Callable[[Future[Answer]], None]) -> None:
    for future in asked:
        # False when its rpc was cancelled meanwhile: nobody listens any more.
        if future.set_running_or_notify_cancel():
            give(future)
