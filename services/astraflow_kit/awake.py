"""Patience that counts only the time in which this process ran.

Invariant: a process that was stopped, or slept with its machine, has not been kept waiting by anybody: of the gap
between two looks at most two periods count, so whoever was asleep as well has time to answer. Used by all that replace,
or give up, somebody who makes no progress.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from astraflow_kit.clock import Clock, SystemClock

T = TypeVar("T")

LOOK_S = 1.0
_UNSEEN = object()


@dataclass
class Silence:
    """How long somebody has made no progress, as one sees it who looks every `period_s`."""

    period_s: float = LOOK_S
    clock: Clock = field(default_factory=SystemClock)
    silent_s: float = 0.0
    _progress: object = _UNSEEN
    _looked_s: float = 0.0

    def look(self, progress: object) -> float:
        """Seconds since `progress`, whatever counts it, was last another than now; 0 at the first look."""
        now_s = self.clock.monotonic_s()
        if progress != self._progress:
            self._progress, self.silent_s = progress, 0.0
        else:
            self.silent_s += min(now_s - self._looked_s, 2 * self.period_s)
        self._looked_s = now_s
        return self.silent_s


async def within(work: Coroutine[Any, Any, T], timeout_s: float, *, clock: Clock | None = None) -> T:
    """What `work` returns or raises. Raises TimeoutError, with `work` cancelled and over, when it takes longer."""
    task = asyncio.ensure_future(work)
    silence = Silence(clock=clock or SystemClock())
    try:
        while not task.done():
            left_s = timeout_s - silence.look(task)
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait((task,), timeout=min(LOOK_S, left_s))
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
