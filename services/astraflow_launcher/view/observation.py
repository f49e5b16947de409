"""What the launcher knows of a run: plain values gathered from the daemons' contracts, and what follows from
them.

Invariant: nothing here talks to anything; `observer` fills an `Observation`, the live view, the metrics file
and the summary only read it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from astraflow.dataflow.v1 import admin_service_pb2, run_pb2, version_pb2
from astraflow.errors import InvalidArgumentError
from astraflow.raas.v1 import node_service_pb2
from astraflow.trainer.v1 import trainer_service_pb2

__all__ = ["Goal", "Observation", "StepPoint", "parse_goal"]


@dataclass(frozen=True)
class StepPoint:
    """One finished step of one policy."""

    policy: str
    step: int
    seconds: float
    """Since the launcher started."""
    metrics: Mapping[str, float]


@dataclass
class Observation:
    """The latest answers of every daemon; fields are None until the first answer."""

    seconds: float = 0.0
    """Since the launcher started."""
    server: str = ""
    """Where the dataflow server is: what `--join` takes, and its pages for people."""
    status: admin_service_pb2.StatusResponse | None = None
    trainers: dict[str, trainer_service_pb2.StatusResponse] = field(default_factory=dict)
    nodes: dict[str, node_service_pb2.StatusResponse] = field(default_factory=dict)
    versions: dict[str, list[version_pb2.Version]] = field(default_factory=dict)
    """Announced versions per policy, oldest first."""
    steps: list[StepPoint] = field(default_factory=list)
    """Finished steps, oldest first; those before a resume come from the metrics file."""
    num_earlier_steps: int = 0
    """How many of `steps` were finished before this launcher started."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Restarts of each child process."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Daemons that did not answer the last question, and why."""
    first_reward_s: float | None = None

    @property
    def run_finished(self) -> bool:
        """Whether the final evaluation is complete."""
        return self.status is not None and self.status.state == run_pb2.RUN_STATE_FINISHED

    def evaluations(self, policy: str) -> list[admin_service_pb2.Evaluation]:
        """Complete evaluations of a policy, oldest first."""
        if self.status is None:
            return []
        return [item for item in self.status.evaluations if item.policy_id == policy and item.complete]

    def policies(self) -> list[str]:
        """Ids of the policies that are trained, sorted."""
        return sorted(item.policy_id for item in self.trained)

    @property
    def trained(self) -> list[admin_service_pb2.PolicyStatus]:
        """The status of each policy that is trained."""
        return [item for item in self.status.policies if not item.frozen] if self.status else []

    def steps_of(self, policy: str) -> list[StepPoint]:
        """Finished steps of a policy, oldest first."""
        return [point for point in self.steps if point.policy == policy]

    def last_step(self, policy: str) -> StepPoint | None:
        """The newest finished step of a policy."""
        return next(reversed(self.steps_of(policy)), None)

    def deltas(self) -> list[version_pb2.Version]:
        """Announced versions of every policy that have a delta."""
        return [version for versions in self.versions.values() for version in versions if version.delta_bytes]


_OPERATORS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}
_GOAL = re.compile(r"^\s*(heldout|reward)\s*(>=|<=)\s*(-?[0-9.]+)\s*$")
_CONSECUTIVE = 2


@dataclass(frozen=True)
class Goal:
    """A condition that ends the run early: met by two consecutive points of every policy."""

    text: str
    measure: str
    compare: Callable[[float, float], bool]
    bound: float

    def met(self, observation: Observation) -> bool:
        """Whether the last two evaluations (or steps, for `reward`) of every policy satisfy the condition."""
        policies = observation.policies()
        return bool(policies) and all(self._met_by(observation, policy) for policy in policies)

    def _met_by(self, observation: Observation, policy: str) -> bool:
        last = self._points(observation, policy)[-_CONSECUTIVE:]
        return len(last) == _CONSECUTIVE and all(self.compare(value, self.bound) for value in last)

    def _points(self, observation: Observation, policy: str) -> list[float]:
        if self.measure == "heldout":
            return [item.mean_reward for item in observation.evaluations(policy)]
        return [point.metrics.get("reward_mean", 0.0) for point in observation.steps_of(policy)]


def parse_goal(text: str) -> Goal:
    """Parse `heldout>=0.7` or `reward>=0.9`; a bare number means held-out reward. Raises
    InvalidArgumentError.
    """
    match = _GOAL.match(text) or _GOAL.match(f"heldout>={text}")
    if match is None:
        raise InvalidArgumentError(f"--until {text!r} is not a condition; write heldout>=0.7 or reward>=0.9")
    measure, symbol, bound = match.groups()
    return Goal(text=text, measure=measure, compare=_OPERATORS[symbol], bound=float(bound))
