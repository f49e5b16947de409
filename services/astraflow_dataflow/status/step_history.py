"""What the steps of policies looked like, as aligned series thinned to what a chart shows.

Each process keeps the columns it has read and asks Redis only for newer steps, so that a look at a run of 100,000 steps
costs what has changed. Called by the admin service, and by reporting for the newest steps.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow_dataflow.records import StepFigures, timestamp
from astraflow_dataflow.store.admin import AdminStore
from astraflow_kit.log import get_logger

log = get_logger(__name__)

MAX_SERIES = 512
"""Figures of a policy that are kept, the first that came: trainers name them, and may name others in each step."""
_POINTS = 1000
_CHUNK = 1000
"""Steps that are read at once, and that a block holds."""
_MAX_HELD, _MAX_HELD_BYTES = 64, 2**29
"""Policies whose steps a process holds, and their bytes; those that were looked at last."""

Floats: TypeAlias = "NDArray[np.float32]"


@dataclass(frozen=True)
class _Block:
    """Some steps in a row, and those figures that any of them has; NaN where one has none."""

    steps: NDArray[np.int64]
    finish_ms: NDArray[np.int64]
    series: Mapping[str, Floats]

    def of(self, name: str) -> Floats:
        values = self.series.get(name)
        return values if values is not None else np.full(len(self.steps), np.nan, np.float32)

    def part(self, chosen: slice) -> "_Block":
        cut = {name: values[chosen] for name, values in self.series.items()}
        return _Block(self.steps[chosen], self.finish_ms[chosen], cut)

    @property
    def num_bytes(self) -> int:
        return len(self.steps) * (16 + 4 * len(self.series))


@dataclass(frozen=True)
class Columns:
    """Steps in order, when each ended in milliseconds, and its figures by name; NaN where it has none.

    Nothing of it changes, so threads may read one that is continued meanwhile.
    """

    blocks: tuple[_Block, ...] = ()
    names: frozenset[str] = frozenset()
    left_out: str = ""
    """The first name for which there was no room, or the step of which none was kept; empty where there was for all."""

    @property
    def last(self) -> int:
        """The newest step; 0 without any."""
        return int(self.blocks[-1].steps[-1]) if self.blocks else 0

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return sum(block.num_bytes for block in self.blocks)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps."""
        return np.concatenate([np.empty(0, np.int64), *(block.steps for block in self.blocks)])

    @property
    def finish_ms(self) -> NDArray[np.int64]:
        """When each ended."""
        return np.concatenate([np.empty(0, np.int64), *(block.finish_ms for block in self.blocks)])

    def values(self, name: str) -> Floats:
        """Return one figure of each step."""
        return np.concatenate([np.empty(0, np.float32), *(block.of(name) for block in self.blocks)])

    def appended(self, figures: Sequence[StepFigures]) -> "Columns":
        """Return these with newer steps."""
        names, left_out = set(self.names), self.left_out
        added, refused = _block(figures, names)
        *whole, last = [*self.blocks, added]
        if whole and len(whole[-1].steps) + len(added.steps) <= _CHUNK:
            last = _merged(whole.pop(), added)
        return Columns((*whole, last), frozenset(names), left_out or refused)

    def between(self, first: int, last: int) -> "Columns":
        """Return the steps from one to another, both included."""
        parts = (
            block.part(slice(*np.searchsorted(block.steps, (first, last + 1)).tolist()))
            for block in self.blocks
            if block.steps[0] <= last and block.steps[-1] >= first
        )
        return replace(self, blocks=tuple(part for part in parts if len(part.steps)))


def _block(figures: Sequence[StepFigures], names: set[str]) -> tuple[_Block, str]:
    """Steps with their figures, as far as `names` has room for those; also the first name for which it had none."""
    series: dict[str, Floats] = {}
    refused = ""
    alike: dict[tuple[str, ...], list[int]] = {}
    for row, item in enumerate(figures):
        alike.setdefault(item.names, []).append(row)
    counted = [(row, name, number) for row, item in enumerate(figures) for name, number in _counts(item)]
    for name in dict.fromkeys(chain((name for _, name, _ in counted), *alike)):
        if name in names or len(names) < MAX_SERIES:
            names.add(name)
            series[name] = np.full(len(figures), np.nan, np.float32)
        else:
            refused = refused or name
    for row, name, number in counted:
        if name in series:
            series[name][row] = number
    for named, rows in alike.items():
        at = np.array(rows)
        table = np.frombuffer(b"".join(figures[row].values for row in rows), "<f4").reshape(len(rows), -1)
        for index, name in enumerate(named):
            if name in series:
                series[name][at] = table[:, index]
    nameless = next((f"those of step {item.step}" for item in figures if item.is_nameless), "")
    steps = np.array([item.step for item in figures], np.int64)
    return _Block(
        steps, np.array([item.finish_ms for item in figures], np.int64), series
    ), refused or nameless


def _counts(item: StepFigures) -> Iterable[tuple[str, float]]:
    for line in item.counts.splitlines():
        counted, _, number = line.rpartition(" ")
        yield f"data.{counted}", float(number)


def _merged(one: _Block, other: _Block) -> _Block:
    names = dict.fromkeys((*one.series, *other.series))
    return _Block(
        np.append(one.steps, other.steps),
        np.append(one.finish_ms, other.finish_ms),
        {name: np.append(one.of(name), other.of(name)) for name in names},
    )


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
            said = held.left_out
            if held.blocks and held.blocks[0].steps[0] < first:
                held = held.between(first, held.last)
            while held.last < last:
                newer = await self.store.steps(run_id, policy_id, after=held.last, limit=_CHUNK)
                if not newer:  # the run was deleted meanwhile, or Redis lost them
                    break
                # A thousand steps of a thousand names take a moment, which others do not wait for.
                held = await asyncio.to_thread(held.appended, newer)
            if held.left_out and not said:
                log.warning(
                    "steps.too_many_names",
                    run_id=run_id,
                    policy_id=policy_id,
                    first_left_out=held.left_out,
                    kept=MAX_SERIES,
                )
            self._held[key] = held
            self._make_room()
        return held

    def forget(self, run_id: str) -> None:
        """The run was deleted."""
        for key in [key for key in self._held if key[0] == run_id]:
            self._held.pop(key)
        for key in [key for key in self._reading if key[0] == run_id]:
            self._reading.pop(key)

    def _make_room(self) -> None:
        num_bytes = sum(held.num_bytes for held in self._held.values())
        while len(self._held) > _MAX_HELD or (num_bytes > _MAX_HELD_BYTES and len(self._held) > 1):
            num_bytes -= self._held.pop(next(iter(self._held))).num_bytes


def thinned(columns: Columns, request: pb.ListStepsRequest) -> pb.ListStepsResponse:
    """Return the steps that were asked for in at most `max_points` points of as many steps each."""
    chosen = columns.between(request.min_step, request.max_step or columns.last)
    known = {name for block in chosen.blocks for name in block.series}
    names = known.intersection(request.names) if request.names else known
    steps, finish_ms = chosen.steps, chosen.finish_ms
    total = len(steps)
    width = max(1, -(-total // (request.max_points or _POINTS)))
    ends = np.minimum(np.arange(width, total + width, width), total) - 1
    return pb.ListStepsResponse(
        steps=steps[ends].tolist(),
        finish_times=[timestamp(ms) for ms in finish_ms[ends].tolist()],
        series=[_series(name, chosen.values(name), width) for name in sorted(names)],
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
