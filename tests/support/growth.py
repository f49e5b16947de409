"""Does a run grow? Memory of each of its processes and bytes of what it writes, sampled while it takes steps, and the
slopes of both after a warm-up.

A slope is fitted through the means of `_BLOCKS` equal blocks of samples, so that the saw-tooth of an allocator, or of a
file that is written anew, counts for what it is; its interval is that of Student's t at 95 %. Used by
tests/e2e/test_dev_growth.py.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from support.development import CHILDREN, RunFiles

_BLOCKS = 12
_STUDENT_T = 2.228
"""Quantile 0.975 for as many blocks less the two numbers of a line."""
_PERIOD_S = 0.25
_STORE_LOG = "seq"


@dataclass(frozen=True)
class Slope:
    """Growth per step, and the bounds that hold it with 95 % confidence."""

    mean: float
    margin: float

    @property
    def at_least(self) -> float:
        """Lower bound."""
        return self.mean - self.margin

    @property
    def at_most(self) -> float:
        """Upper bound."""
        return self.mean + self.margin


@dataclass
class Growth:
    """Samples of one run: the steps taken, and at each of these moments every size in bytes, by name."""

    steps: list[int] = field(default_factory=list)
    sizes: dict[str, list[float]] = field(default_factory=dict)

    def add(self, step: int, sizes: Mapping[str, float]) -> None:
        """Add a moment; what was not there then counts as empty."""
        for name in sizes.keys() - self.sizes.keys():
            self.sizes[name] = [0.0] * len(self.steps)
        self.steps.append(step)
        for name, known in self.sizes.items():
            known.append(sizes.get(name, 0.0))

    def slope(self, name: str, *, after_step: int) -> Slope:
        """Bytes per step of what is called `name`."""
        chosen = [place for place, step in enumerate(self.steps) if step > after_step]
        return fitted([self.steps[place] for place in chosen], [self.sizes[name][place] for place in chosen])

    def peak(self, name: str) -> float:
        """The largest size seen."""
        return max(self.sizes[name])


def fitted(steps: Sequence[float], sizes: Sequence[float]) -> Slope:
    """The line through the means of blocks of samples. Raises ValueError when there are too few."""
    if len(steps) < 2 * _BLOCKS:
        raise ValueError(f"{len(steps)} samples after the warm-up; {2 * _BLOCKS} make a slope")
    x, y = (
        np.array([block.mean() for block in np.array_split(values, _BLOCKS)]) for values in (steps, sizes)
    )
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    left = y - y.mean() - slope * centred
    error = float(np.sqrt(left @ left / (_BLOCKS - 2) / (centred @ centred)))
    return Slope(slope, _STUDENT_T * error)


def watch(files: RunFiles, *, launcher_pid: int, steps: int, alive: Callable[[], None]) -> Growth:
    """Sample the run until it has taken `steps`; `alive` raises when it cannot any more."""
    growth, step = Growth(), 0
    while step < steps:
        alive()
        time.sleep(_PERIOD_S)
        step = files.steps_taken()
        # A process that was started again begins anew: its growth would hide.
        started = [name for name, _ in files.starts()]
        assert len(started) == len(set(started)), f"a process was started again: {started}"
        growth.add(step, {**memory_of(files, launcher_pid=launcher_pid), **bytes_of(files.data_dir)})
    return growth


def memory_of(files: RunFiles, *, launcher_pid: int) -> dict[str, float]:
    """Resident bytes of each process of a run."""
    names = {child: role for role, child in CHILDREN.items()}
    pids = {names[child]: pid for child, pid in files.starts()} | {"launcher": launcher_pid}
    # The guard in front of the engine has the same words.
    engine = max((process.pid for process in files.processes("-m astraflow_engine")), default=None)
    pids |= {"engine": engine} if engine is not None else {}
    found = {}
    for role, pid in pids.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[f"RSS {role}"] = float(psutil.Process(pid).memory_info().rss)
    return found


def bytes_of(data_dir: Path) -> dict[str, float]:
    """Bytes of what a run writes, by kind."""
    work = data_dir / "work"
    kinds: dict[str, Iterable[Path]] = {
        "Redis' files": (data_dir / "redis").rglob("*"),
        "metrics.jsonl": [data_dir / "metrics.jsonl"],
        "ledger and journal": [*work.glob("*/ledger*.jsonl"), *work.glob("*/*/pushes*.jsonl")],
        "store log": [path for path in (data_dir / "store").rglob("*") if _STORE_LOG in path.parts],
        "store without its log": [
            path for path in (data_dir / "store").rglob("*") if _STORE_LOG not in path.parts
        ],
    }
    for name in {path.name.partition(".")[0] for path in (data_dir / "logs").glob("*.log")}:
        kinds[f"logs of {name}"] = (data_dir / "logs").glob(f"{name}.*")
    return {kind: float(sum(map(_size, paths))) for kind, paths in kinds.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # renamed or collected since it was listed
        return 0
