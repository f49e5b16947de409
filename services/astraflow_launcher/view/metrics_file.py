"""`metrics.jsonl`: one JSON object per finished step, evaluation and announced version, appended as they
happen.

Every line has `kind`, `run_id`, `policy` and the counter (`step` or `version`) that joins it with the
daemons' logs. Invariant: each of them has one line, also over a run that is resumed in the same folder; a line
cut short by a kill is removed, one that a disk damaged is left where it is and written again when it is known; a number
that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from astraflow_kit.log import get_logger
from astraflow_launcher.view.observation import Observation, StepPoint

__all__ = ["MetricsFile", "to_json"]

log = get_logger(__name__)

_Key = tuple[object, ...]
_NOT_METRICS = frozenset({"kind", "run_id", "policy", "step", "seconds"})


class MetricsFile:
    """Appends what is new in an observation. Close it, or use it as a context manager."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        self.earlier_steps: list[StepPoint] = []
        """Steps that earlier launchers of this run wrote, oldest first."""
        self._known: set[_Key] = set()
        for number, content in enumerate(_whole_lines(path), start=1):
            try:
                self._take_in(json.loads(content))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                log.warning("metrics.line_damaged", path=str(path), line=number, message=repr(error))
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._run_id = run_id
        self._steps = 0
        self._versions: dict[str, int] = {}

    def _take_in(self, line: dict[str, Any]) -> None:
        key = _key(line)
        if line["kind"] == "step":
            self.earlier_steps.append(_point(line))
        self._known.add(key)

    def write(self, observation: Observation) -> None:
        """Append steps, versions and complete evaluations that are not there yet."""
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
            for item in observation.evaluations(policy):
                self._append(
                    "evaluation",
                    policy,
                    version=item.version,
                    seconds=observation.seconds,
                    evaluation=item.evaluation_id,
                    heldout_reward=item.mean_reward,
                    heldout_roles={role.role: role.mean_reward for role in item.roles},
                    heldout_metrics=dict(item.metrics),
                    num_samples=item.num_samples,
                    final=item.final,
                )

    def _append(self, kind: str, policy: str, **fields: object) -> None:
        line = {"kind": kind, "run_id": self._run_id, "policy": policy, **fields}
        key = _key(line)
        if key not in self._known:
            self._known.add(key)
            self._file.write(to_json(line) + "\n")

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def to_json(value: object) -> str:
    """Return `value` as JSON that every reader takes: NaN and infinities become null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of the file, after removing a last one that a kill cut short."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.splitlines()


def _key(line: Mapping[str, Any]) -> _Key:
    """What a line is about; a second one about the same is never written."""
    number = line["step"] if line["kind"] == "step" else line["version"]
    return line["kind"], line["policy"], number, (line.get("evaluation"), line.get("final"))


def _point(line: Mapping[str, Any]) -> StepPoint:
    metrics = {
        name: math.nan if value is None else float(value)
        for name, value in line.items()
        if name not in _NOT_METRICS
    }
    return StepPoint(line["policy"], line["step"], line["seconds"], metrics)
