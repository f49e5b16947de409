"""How long a node took from the start of its process to its first lease, stage by stage.

Invariant: a stage keeps its latest mark until the first lease, so with several policies it tells when the last of
them was there; what happens later (restarted engines, new versions) changes nothing. Pure; marked by `server`,
`weight_sync`, `engine_host` and `worker`, shown as the metric `astraflow_raas_start_seconds` and one line of the log.
"""

import os
import time
from enum import StrEnum
from pathlib import Path

from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)


class Stage(StrEnum):
    """What a starting node reaches, in this order."""

    JOINED = "joined"
    VERSION = "version"
    WEIGHTS = "weights"
    ENGINE_LAUNCHED = "engine_launched"
    ENGINE_READY = "engine_ready"
    ASKED = "asked"
    """For work, with credits; from here on the server may have none to give."""
    FIRST_LEASE = "first_lease"


class Timeline:
    """Times since the process started; `age_s` is how old the process is now."""

    def __init__(
        self, *, metrics: Metrics | None = None, age_s: float = 0.0, clock: Clock | None = None
    ) -> None:
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._started_s = self._clock.monotonic_s() - age_s
        self.reached_s: dict[Stage, float] = {}
        """Seconds from the start of the process to each stage reached so far."""

    def mark(self, stage: Stage) -> None:
        """The node reached `stage` now; without effect after the first lease."""
        if Stage.FIRST_LEASE in self.reached_s:
            return
        self.reached_s[stage] = self._clock.monotonic_s() - self._started_s
        if self._metrics is not None:
            self._metrics.set("astraflow_raas_start_seconds", self.reached_s[stage], stage=stage.value)
        if stage is Stage.FIRST_LEASE:
            self._log()

    @property
    def engine_start_s(self) -> float:
        """Seconds from launching the engine until it could sample; 0 when it ran already."""
        launched_s = self.reached_s.get(Stage.ENGINE_LAUNCHED)
        return 0.0 if launched_s is None else self.reached_s[Stage.ENGINE_READY] - launched_s

    def _log(self) -> None:
        reached = {f"{stage.value}_s": round(at_s, 3) for stage, at_s in self.reached_s.items()}
        engine_start_s = self.engine_start_s
        log.info(
            "node.first_lease",
            **reached,
            engine_start_s=round(engine_start_s, 3),
            besides_engine_s=round(self.reached_s[Stage.FIRST_LEASE] - engine_start_s, 3),
        )


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process was started; 0 where the kernel does not say (not Linux)."""
    if not stat.exists():
        return 0.0
    # The command's name may hold anything but ends with the last parenthesis; field 22 counts from its start.
    start_ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
