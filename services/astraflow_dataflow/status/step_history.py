"""What the steps of policies looked like, as aligned series thinned to what a chart shows.

Each process keeps the columns it has read and asks Redis only for newer steps, so that a look at a run of 100,000 steps
costs what has changed. Called by the admin service, and by reporting for the newest steps.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow_dataflow.records import StepFigures, timestamp
from astraflow_dataflow.store.admin import AdminStore

_POINTS = 1000
_CHUNK = 1000
"""Steps that are read at once; other work of the server runs between chunks."""
_MAX_HELD = 64
"""Policies whose steps a process holds; those that were looked at last."""

Floats: TypeAlias = "NDArray[np.float32]"


@dataclass
class Columns:
    """Steps in order, when each ended in milliseconds, and its figures by name; NaN where it has none."""

    steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    finish_ms: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    series: dict[str, Floats] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The newest step; 0 without any."""
        return int(self.steps[-1]) if len(self.steps) else 0

    def append(self, figures: Sequence[StepFigures]) -> None:
        """Add newer steps."""
        added, before = len(figures), len(self.steps)
        self.steps = np.append(self.steps, np.array([item.step for item in figures], np.int64))
        self.finish_ms = np.append(self.finish_ms, np.array([item.finish_ms for item in figures], np.int64))
        for name, values in self.series.items():
            self.series[name] = np.append(values, np.full(added, np.nan, np.float32))
        position = before
        for names, alike in groupby(figures, key=lambda item: item.names):
            rows = list(alike)
            table = np.frombuffer(b"".join(row.values for row in rows), "<f4").reshape(len(rows), len(names))
            for index, name in enumerate(names):
                self._column(name)[position : position + len(rows)] = table[:, index]
            for offset, row in enumerate(rows):
                for line in row.counts.splitlines():
                    counted, _, number = line.rpartition(" ")
                    self._column(f"data.{counted}")[position + offset] = float(number)
            position += len(rows)

    def since(self, first: int) -> "Columns":
        """Return the steps from one on."""
        return self.between(first, self.last)

    def between(self, first: int, last: int) -> "Columns":
        """Return the steps from one to another, both included."""
        low, high = np.searchsorted(self.steps, (first, last + 1))
        chosen = slice(int(low), int(high))
        return Columns(
            self.steps[chosen], self.finish_ms[chosen], {name: s[chosen] for name, s in self.series.items()}
        )

    def _column(self, name: str) -> Floats:
        if name not in self.series:
            self.series[name] = np.full(len(self.steps), np.nan, np.float32)
        return self.series[name]


@dataclass
class StepHistory:
    """The steps that this process knows of."""

    store: AdminStore
    _held: dict[tuple[str, str], Columns] = field(default_factory=dict)
    _reading: dict[tuple[str, str], asyncio.Lock] = field(default_factory=dict)

    async def of(self, run_id: str, policy_id: str) -> Columns:
        """Return all steps that are kept of a policy."""
        key = (run_id, policy_id)
        async with self._reading.setdefault(key, asyncio.Lock()):
            first, last = await self.store.num_steps(run_id, policy_id)
            held = self._held.pop(key, None)
            if held is None or last < held.last:  # Redis lost steps, or the run was made anew
                held = Columns()
            if len(held.steps) and held.steps[0] < first:
                held = held.since(first)
            while held.last < last:
                newer = await self.store.steps(run_id, policy_id, after=held.last, limit=_CHUNK)
                if not newer:  # the run was deleted meanwhile, or Redis lost them
                    break
                held.append(newer)
            self._held[key] = held
            while len(self._held) > _MAX_HELD:
                self._held.pop(next(iter(self._held)))
        return held

    def forget(self, run_id: str) -> None:
        """The run was deleted."""
        for key in [key for key in self._held if key[0] == run_id]:
            self._held.pop(key)
        for key in [key for key in self._reading if key[0] == run_id]:
            self._reading.pop(key)


def thinned(columns: Columns, request: pb.ListStepsRequest) -> pb.ListStepsResponse:
    """Return the steps that were asked for in at most `max_points` points of as many steps each."""
    chosen = columns.between(request.min_step, request.max_step or columns.last)
    names = (
        [name for name in request.names if name in chosen.series] if request.names else list(chosen.series)
    )
    total = len(chosen.steps)
    width = max(1, -(-total // (request.max_points or _POINTS)))
    ends = np.minimum(np.arange(width, total + width, width), total) - 1
    return pb.ListStepsResponse(
        steps=chosen.steps[ends].tolist(),
        finish_times=[timestamp(ms) for ms in chosen.finish_ms[ends].tolist()],
        series=[_series(name, chosen.series[name], width) for name in sorted(names)],
        total=total,
    )


def _series(name: str, values: Floats, width: int) -> pb.StepSeries:
    if width == 1:
        return pb.StepSeries(name=name, mean=_short(values))
    padding = -len(values) % width
    points = np.append(values, np.full(padding, np.nan, np.float32)).reshape(-1, width).astype(np.float64)
    known = np.isfinite(points)
    count = known.sum(axis=1)
    total = np.where(known, points, 0.0).sum(axis=1)
    empty = count == 0
    return pb.StepSeries(
        name=name,
        mean=_short(np.where(empty, np.nan, total / np.maximum(count, 1))),
        min=_short(np.where(empty, np.nan, np.where(known, points, np.inf).min(axis=1))),
        max=_short(np.where(empty, np.nan, np.where(known, points, -np.inf).max(axis=1))),
    )


def _short(values: NDArray[np.floating]) -> list[float]:
    """Seven digits, which is what is kept of them: in JSON they take half as many bytes."""
    return [float(f"{value:.7g}") for value in values.tolist()]
