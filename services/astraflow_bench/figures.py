"""One figure of a benchmark, and the CPU time of works and of processes.

Invariant: a figure with a limit is a target; one without is there to be read. Called by every measurement.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`subject` says whose figure it is, empty where that is plain; `least` and `most` bound a target.

    `value` is None where nothing was measured; `unit` says why.
    """

    what: str
    subject: str
    value: float | None
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None for what is no target or was not measured."""
        if self.value is None or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )


def least_cpu_seconds(runs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Least CPU-seconds of each run, in turns, after one unmeasured turn: a busy machine only ever adds."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            if turn:
                spent[name].append(time.process_time() - started)
    return {name: min(times) for name, times in spent.items()}


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
