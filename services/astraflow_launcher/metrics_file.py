"""`metrics.jsonl`: one JSON object per finished step, evaluation and announced version, appended as they
happen.

Every line has `kind`, `run_id`, `policy` and the counter (`step` or `version`) that joins it with the
daemons' logs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from astraflow_launcher.observation import Observation

__all__ = ["MetricsFile"]


class MetricsFile:
    """Appends what is new in an observation. Close it, or use it as a context manager."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._run_id = run_id
        self._steps = 0
        self._versions: dict[str, int] = {}
        self._evaluations: set[tuple[str, int, bool]] = set()

    def write(self, observation: Observation) -> None:
        """Append steps, versions and complete evaluations that were not there at the last call."""
        for point in observation.steps[self._steps :]:
            self._append("step", point.policy, step=point.step, seconds=point.seconds, **point.metrics)
        self._steps = len(observation.steps)
        for policy, versions in observation.versions.items():
            for version in versions[self._versions.get(policy, 0) :]:
                self._append(
                    "version",
                    policy,
                    version=version.version,
                    step=version.step,
                    delta_bytes=version.delta_bytes,
                    snapshot_bytes=version.snapshot_bytes,
                    density=version.density,
                )
            self._versions[policy] = len(versions)
        for policy in observation.policies():
            self._write_evaluations(observation, policy)

    def _write_evaluations(self, observation: Observation, policy: str) -> None:
        for item in observation.evaluations(policy):
            key = (policy, item.version, item.final)
            if key not in self._evaluations:
                self._evaluations.add(key)
                self._append(
                    "evaluation",
                    policy,
                    version=item.version,
                    seconds=observation.seconds,
                    heldout_reward=item.mean_reward,
                    num_samples=item.num_samples,
                    final=item.final,
                )

    def _append(self, kind: str, policy: str, **fields: object) -> None:
        self._file.write(
            json.dumps({"kind": kind, "run_id": self._run_id, "policy": policy, **fields}) + "\n"
        )

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
