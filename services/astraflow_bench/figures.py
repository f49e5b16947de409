"""One figure of a benchmark, the median of several, and the CPU time of works and of processes.

Invariant: a figure with a limit is a target; one without is there to be read. Called by every measurement.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

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


def medians(rounds: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The figures of equal rounds, each with its median; a ratio's is that of the ratios within rounds."""
    figures = []
    for same in zip(*rounds, strict=True):
        measured = [figure.value for figure in same if figure.value is not None]
        figures.append(replace(same[0], value=median(measured) if measured else None))
    return figures


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


def cpu_seconds(pids: Iterable[int], *, with_children: bool = True) -> float:
    """CPU time so far of these processes and of all that descend from them and live."""
    spent = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(pid).children(recursive=True) if with_children else []
            spent += sum(map(_cpu_seconds_of, [pid, *(child.pid for child in family)]))
    return spent


def _cpu_seconds_of(pid: int) -> float:
    """0 of a process that is gone."""
    if sys.platform == "linux":
        with suppress(OSError):
            # The clock of a process by its number (clock_getcpuclockid(3)): /proc counts in ticks of 10 ms.
            return time.clock_gettime((~pid << 3) | 2)
        return 0.0
    with suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
