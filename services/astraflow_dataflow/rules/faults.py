"""Faults of a run's plug-ins, as this process met them: which one, where it raised, how often.

A plug-in that fails costs only what it was asked about; here is what people are told of it. Pure. Noted by whoever
calls a plug-in, shown by reporting as a wait of the run and as a gauge.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

SHOWN_S = 60.0
"""A fault is shown this long after it last happened."""


@dataclass
class PluginFault:
    """What one plug-in did wrong last; `kind` is `dataset`, `curator`, `filter` or `selector`."""

    kind: str
    name: str
    count: int = 0
    problem: str = ""
    seen_s: float = 0.0


@dataclass
class PluginFaults:
    """The faults of a run's plug-ins; `monotonic_s` is a clock in seconds."""

    monotonic_s: Callable[[], float] = time.monotonic
    _faults: dict[tuple[str, str], PluginFault] = field(default_factory=dict)

    def note(self, kind: str, name: str, error: Exception) -> None:
        """Count a fault."""
        fault = self._faults.setdefault((kind, name), PluginFault(kind, name))
        fault.count += 1
        fault.problem, fault.seen_s = describe(error), self.monotonic_s()

    def all(self) -> list[PluginFault]:
        """Return the last fault of each plug-in that ever had one."""
        return list(self._faults.values())

    def current(self) -> list[PluginFault]:
        """Return those that happened lately."""
        since_s = self.monotonic_s() - SHOWN_S
        return [fault for fault in self._faults.values() if fault.seen_s >= since_s]


def describe(error: Exception) -> str:
    """Return what was raised and where, for a person."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"
