"""What is said of all steps and versions of one policy, added up one by one, so that none of them has to be held."""

from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.dataflow.v1 import version_pb2

NO_SIGNAL = "no signal"


@dataclass(frozen=True)
class StepPoint:
    """One finished step of one policy."""

    policy: str
    step: int
    seconds: float
    """Since the launcher started."""
    metrics: Mapping[str, float]

    @property
    def skipped_for(self) -> str:
        """Why the step changed no weight; empty when it did."""
        if not self.metrics.get("skipped", 0.0):
            return ""
        if self.metrics.get("skipped_critic_warmup", 0.0):
            return "only the critic learns"
        return NO_SIGNAL if self.metrics.get("skipped_no_signal", 1.0) else "loss or gradient not finite"


@dataclass
class Totals:
    """Sums over steps and versions that were added in their order."""

    num_steps: int = 0
    num_skipped: int = 0
    num_without_signal: int = 0
    """Of the skipped ones."""
    first_step: StepPoint | None = None
    last_taken: StepPoint | None = None
    """The newest step that was not skipped."""
    num_versions: int = 0
    snapshot_bytes: int = 0
    """Of the first version."""
    num_deltas: int = 0
    delta_bytes: int = 0
    densities: float = 0.0
    """Sum over the versions that have a delta."""

    def add_step(self, point: StepPoint) -> None:
        """Add the next step."""
        self.num_steps += 1
        self.first_step = self.first_step or point
        if not point.skipped_for:
            self.last_taken = point
            return
        self.num_skipped += 1
        self.num_without_signal += point.skipped_for == NO_SIGNAL

    def add_version(self, version: version_pb2.Version) -> None:
        """Add the next version."""
        if not self.num_versions:
            self.snapshot_bytes = version.snapshot_bytes
        self.num_versions += 1
        if version.delta_bytes:
            self.num_deltas += 1
            self.delta_bytes += version.delta_bytes
            self.densities += version.density
