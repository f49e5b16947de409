"""`metrics.jsonl`: one JSON object per finished step, evaluation and announced version, appended as they
happen.

Every line has `kind`, `run_id`, `policy` and the counter (`step` or `version`) that joins it with the
daemons' logs. Invariant: each of them has one line, also over a run that is resumed in the same folder, and counters
rise; a line cut short by a kill is removed, one that a disk damaged is left where it is and passed over; a number that
is not finite is null. The file is as long as the run: it is read line by line and never held.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from astraflow_kit.log import get_logger
from astraflow_kit.log_files import drop_cut_line
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.totals import StepPoint

log = get_logger(__name__)

_COUNTERS = {"step": "step", "version": "version", "evaluation": "version"}
_NOT_METRICS = frozenset({"kind", "run_id", "policy", "step", "seconds"})


class MetricsFile:
    """Appends what is new in an observation. Close it, or use it as a context manager."""

    def __init__(self, path: Path, *, run_id: str) -> None:
        drop_cut_line(path)
        self._newest: dict[tuple[str, str], int] = {}
        self._evaluations: set[tuple[object, ...]] = set()
        for line in read_lines(path):
            self._is_new(line)
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._run_id = run_id
        self._steps = 0
        self._versions: dict[str, int] = {}

    def earlier_steps(self) -> Iterator[StepPoint]:
        """Steps that earlier launchers of this run wrote, oldest first; ask before anything is written."""
        return (_point(line) for line in read_lines(self._path) if line["kind"] == "step")

    def write(self, observation: Observation) -> None:
        """Append steps, versions and complete evaluations that are not there yet."""
        for point in observation.steps_after(self._steps):
            self._append("step", point.policy, step=point.step, seconds=point.seconds, **point.metrics)
        self._steps = observation.num_steps
        for policy in observation.versions:
            for version in observation.versions_after(policy, self._versions.get(policy, 0)):
                self._append(
                    "version",
                    policy,
                    version=version.version,
                    step=version.step,
                    delta_bytes=version.delta_bytes,
                    snapshot_bytes=version.snapshot_bytes,
                    density=version.density,
                )
            self._versions[policy] = observation.totals(policy).num_versions
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
        if self._is_new(line):
            self._file.write(to_json(line) + "\n")

    def _is_new(self, line: Mapping[str, Any]) -> bool:
        """Whether nothing was written about the same; it counts as written from now on."""
        kind, policy = line["kind"], line["policy"]
        if kind == "evaluation":
            evaluation = (policy, line["version"], line.get("evaluation"), line.get("final"))
            is_new = evaluation not in self._evaluations
            self._evaluations.add(evaluation)
            return is_new
        number, newest = int(line[kind]), self._newest.get((kind, policy), -1)
        self._newest[kind, policy] = max(number, newest)
        return number > newest

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


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, none where there is none; one that a disk damaged is passed over and logged."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            try:
                line = _line(content)
            except (ValueError, LookupError, TypeError) as error:
                log.warning("metrics.line_damaged", path=str(path), line=number, message=repr(error))
            else:
                yield line


def _line(content: bytes) -> dict[str, Any]:
    """Raises ValueError, LookupError, TypeError for what this module did not write."""
    line: dict[str, Any] = json.loads(content)
    counter = _COUNTERS[line["kind"]]
    line |= {counter: int(line[counter]), "policy": str(line["policy"])}
    if line["kind"] == "step":
        _point(line)
    return line


def _point(line: Mapping[str, Any]) -> StepPoint:
    metrics = {
        name: math.nan if value is None else float(value)
        for name, value in line.items()
        if name not in _NOT_METRICS
    }
    return StepPoint(line["policy"], line["step"], line["seconds"], metrics)
