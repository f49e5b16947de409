"""One figure of the rollout benchmark, and the CPU time of processes.

Invariant: a figure with a limit is a target; one without is there to be read. Called by every measurement.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`engine` is empty where none is meant; `least` and `most` bound a target."""

    what: str
    engine: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None for what is no target."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time so far of these processes and of all that descend from them and live."""
    spent = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    spent += times.user + times.system
    return spent
