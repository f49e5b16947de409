"""Faults of a run's plug-ins, as this process met them: which one, where it raised, how often.

A plug-in that fails costs only what it was asked about; here is what people see of it. Pure. Noted by whoever
calls a plug-in, shown by reporting as a wait of the run and as a gauge.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from astraflow.errors import PluginError
from astraflow_kit.plugins import describe

SHOWN_S = 60.0
"""A fault is shown this long after it last happened."""
SLOW_S = 1.0
"""A call in a thread that takes longer is a fault."""


@dataclass
class PluginFault:
    """What one plug-in did wrong last; `kind` is `dataset`, `curator`, `filter` or `selector`."""

    kind: str
    name: str
    count: int = 0
    problem: str = ""
    seen_s: float = 0.0
    hangs: bool = False
    """It is at it now and has not returned."""


@dataclass
class PluginFaults:
    """The faults of a run's plug-ins; `monotonic_s` is a clock in seconds."""

    monotonic_s: Callable[[], float] = time.monotonic
    _faults: dict[tuple[str, str], PluginFault] = field(default_factory=dict)
    _running: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    """What is under way, and since when."""

    def note(self, kind: str, name: str, error: BaseException) -> bool:
        """Count a fault; return whether it is another than the plug-in's last one."""
        fault = self._faults.setdefault((kind, name), PluginFault(kind, name))
        before, fault.problem = (
            fault.problem,
            error.message if isinstance(error, PluginError) else describe(error),
        )
        fault.seen_s = self.monotonic_s()
        fault.count += 1
        return fault.problem != before

    def note_slow(self, kind: str, name: str, took_s: float, *, limit_s: float) -> None:
        """Count a call that took longer than it may."""
        self.note(kind, name, TimeoutError(f"it took {took_s:.2g} s, at most {limit_s:g} s; make it faster"))

    @contextmanager
    def timed(self, kind: str, name: str) -> Iterator[None]:
        """Count what is inside as a fault when it is slow."""
        started_s = self.monotonic_s()
        with self.running(kind, name):
            yield
        took_s = self.monotonic_s() - started_s
        if took_s > SLOW_S:
            self.note_slow(kind, name, took_s, limit_s=SLOW_S)

    @contextmanager
    def running(self, kind: str, name: str, doing: str = "a call") -> Iterator[None]:
        """What is inside is a call, or what `doing` names: one that does not return is shown as a fault until then."""
        self._running[kind, name] = doing, self.monotonic_s()
        try:
            yield
        finally:
            self._running.pop((kind, name), None)

    def clear(self, kind: str, name: str) -> None:
        """The plug-in works again."""
        self._faults.pop((kind, name), None)

    def all(self) -> list[PluginFault]:
        """Return the last fault of each plug-in that ever had one."""
        return list(self._faults.values())

    def current(self) -> list[PluginFault]:
        """Return those that happened lately, and calls that have not returned."""
        now_s = self.monotonic_s()
        lately = [fault for fault in self._faults.values() if fault.seen_s >= now_s - SHOWN_S]
        # A copy, for calls begin and end in threads.
        return lately + [
            PluginFault(
                kind,
                name,
                problem=f"{doing} has not returned for {now_s - since_s:.0f} s",
                seen_s=now_s,
                hangs=True,
            )
            for (kind, name), (doing, since_s) in list(self._running.items())
            if now_s - since_s > SLOW_S
        ]
