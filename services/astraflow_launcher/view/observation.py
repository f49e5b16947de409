"""What the launcher knows of a run: plain values gathered from the daemons' contracts, and what follows from
them.

Invariant: nothing here talks to anything; `observer` fills an `Observation`, the live view, the metrics file
and the summary only read it. What is held is bounded however long the run: of steps and versions that the metrics file
has, the newest, and sums.
"""

import math
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from astraflow.commands.waits import in_order
from astraflow.dataflow.v1 import admin_service_pb2, evaluation_service_pb2, run_pb2, version_pb2
from astraflow.errors import InvalidArgumentError
from astraflow.raas.v1 import node_service_pb2
from astraflow.trainer.v1 import trainer_service_pb2
from astraflow_launcher.view.totals import StepPoint, Totals

KEPT = 128
"""Of each policy, how many of the newest steps and versions are held once all were written down."""


@dataclass
class Observation:
    """The latest answers of every daemon; fields are None until the first answer."""

    seconds: float = 0.0
    """Since the launcher started."""
    server: str = ""
    """Where the dataflow server is: what `--join` takes, and its pages for people."""
    server_wait: admin_service_pb2.Wait | None = None
    """Set while the server does not answer; `status` is then its last."""
    status: admin_service_pb2.StatusResponse | None = None
    trainers: dict[str, trainer_service_pb2.StatusResponse] = field(default_factory=dict)
    nodes: dict[str, node_service_pb2.StatusResponse] = field(default_factory=dict)
    versions: dict[str, list[version_pb2.Version]] = field(default_factory=dict)
    """The newest announced versions per policy, oldest first."""
    steps: list[StepPoint] = field(default_factory=list)
    """The newest finished steps, oldest first; those before a resume come from the metrics file."""
    forgotten: dict[str, Totals] = field(default_factory=dict)
    """Of each policy, what came before those."""
    num_earlier_steps: int = 0
    """How many steps were finished before this launcher started."""
    last_evaluation: evaluation_service_pb2.GetEvaluationResponse | None = None
    """The newest evaluation with its scores, without tasks; read when the run ends."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Restarts of each child process."""
    ends: dict[str, str] = field(default_factory=dict)
    """How those that were started again ended last."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Daemons that did not answer the last question, and why."""
    silent: dict[str, str] = field(default_factory=dict)
    """Of those the processes that are alive and have answered nothing, and for how long."""
    first_reward_s: float | None = None

    @property
    def waits(self) -> list[admin_service_pb2.Wait]:
        """What waits now, in the order in which a person must see to it."""
        own = [self.server_wait] if self.server_wait is not None else []
        return in_order([*own, *(self.status.waits if self.status else ())])

    @property
    def run_finished(self) -> bool:
        """Whether the final evaluation is complete."""
        return self.status is not None and self.status.state == run_pb2.RUN_STATE_FINISHED

    @property
    def stopped_for(self) -> str:
        """Why the server stopped the run; empty when it did not."""
        return self.status.stopped_for if self.status is not None else ""

    @property
    def tracker_faults(self) -> list[tuple[str, trainer_service_pb2.TrackerFault]]:
        """(policy, fault) of each experiment tracker that lacks steps."""
        return [(policy, fault) for policy, item in self.trainers.items() for fault in item.tracker_faults]

    @property
    def num_skipped(self) -> int:
        """Steps of all policies that changed no weight."""
        return sum(self.totals(policy).num_skipped for policy in self._known_policies())

    @property
    def num_steps(self) -> int:
        """Finished steps of all policies."""
        return len(self.steps) + sum(totals.num_steps for totals in self.forgotten.values())

    def steps_after(self, count: int) -> list[StepPoint]:
        """The steps that came after the first `count` of all policies, as far as they are held."""
        return self.steps[max(0, len(self.steps) - max(0, self.num_steps - count)) :]

    def versions_after(self, policy: str, count: int) -> list[version_pb2.Version]:
        """The versions of a policy that came after the first `count`, as far as they are held."""
        num_forgotten = self.forgotten[policy].num_versions if policy in self.forgotten else 0
        return self.versions.get(policy, [])[max(0, count - num_forgotten) :]

    def totals(self, policy: str) -> Totals:
        """Sums over all steps and versions of a policy."""
        totals = replace(self.forgotten.get(policy, Totals()))
        for point in self.steps_of(policy):
            totals.add_step(point)
        for version in self.versions.get(policy, []):
            totals.add_version(version)
        return totals

    def forget(self, *, kept: int = KEPT) -> None:
        """Hold only the newest steps and versions of each policy. Everyone who shows or writes down each of them must
        have seen them all.
        """
        left = {policy: len(self.steps_of(policy)) - kept for policy in self._known_policies()}
        held = []
        for point in self.steps:
            if left[point.policy] > 0:
                left[point.policy] -= 1
                self._forgotten(point.policy).add_step(point)
            else:
                held.append(point)
        self.steps = held
        for policy, versions in self.versions.items():
            for version in versions[:-kept]:
                self._forgotten(policy).add_version(version)
            del versions[:-kept]

    def _forgotten(self, policy: str) -> Totals:
        return self.forgotten.setdefault(policy, Totals())

    def _known_policies(self) -> set[str]:
        return {point.policy for point in self.steps} | self.versions.keys() | self.forgotten.keys()

    @property
    def learned_nothing(self) -> str:
        """One sentence when no step changed a weight, and why; empty when one did."""
        if self.num_steps > self.num_skipped or not self.trained:
            return ""
        if self.num_skipped > sum(
            self.totals(policy).num_without_signal for policy in self._known_policies()
        ):
            return f"nothing was learned: all {self.num_steps} steps were skipped, see `skipped` in metrics.jsonl"
        if self.num_steps:
            return (
                f"nothing was learned: all {self.num_steps} steps were skipped, as the answers to each task earned "
                "the same reward; look at the reward, and at how hard the tasks are"
            )
        # A trainer that is not ours has no metrics of steps here; the server knows that it took them.
        if any(policy.last_finished_step for policy in self.trained):
            return ""
        return "nothing was learned: no step was trained"

    @property
    def num_evaluated(self) -> int:
        """Results of all evaluations so far."""
        return sum(item.num_samples for item in self.status.evaluations) if self.status is not None else 0

    @property
    def evaluating(self) -> list[admin_service_pb2.Evaluation]:
        """Evaluations of trained policies that go on."""
        return [item for item in self.status.evaluations if not item.complete] if self.status else []

    def evaluations(self, policy: str) -> list[admin_service_pb2.Evaluation]:
        """Complete evaluations of a policy, oldest first."""
        if self.status is None:
            return []
        return [item for item in self.status.evaluations if item.policy_id == policy and item.complete]

    def heldout_metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Of a run of several policies, each metric of its evaluations whose means all lie in [0, 1] as rewards do, as
        (version of the first policy, mean).
        """
        found: dict[str, list[tuple[int, float]]] = {}
        policies = self.policies()
        for item in self.evaluations(policies[0]) if len(policies) > 1 else ():
            for name, mean in item.metrics.items():
                found.setdefault(name, []).append((item.version, mean))
        return {name: points for name, points in found.items() if all(0 <= mean <= 1 for _, mean in points)}

    def policies(self) -> list[str]:
        """Ids of the policies that are trained, sorted."""
        return sorted(item.policy_id for item in self.trained)

    @property
    def trained(self) -> list[admin_service_pb2.PolicyStatus]:
        """The status of each policy that is trained."""
        return [item for item in self.status.policies if not item.frozen] if self.status else []

    def steps_of(self, policy: str) -> list[StepPoint]:
        """The newest finished steps of a policy, oldest first."""
        return [point for point in self.steps if point.policy == policy]

    def last_step(self, policy: str) -> StepPoint | None:
        """The newest finished step of a policy."""
        return next(reversed(self.steps_of(policy)), None)


_OPERATORS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}
_GOAL = re.compile(r"^\s*(?:([a-z0-9][a-z0-9_-]*)\.)?([A-Za-z_][\w.-]*)\s*(>=|<=)\s*(-?[0-9.]+)\s*$")
_CONSECUTIVE = 2
_HELDOUT, _REWARD = "heldout", "reward"


@dataclass(frozen=True)
class Goal:
    """A condition that ends the run early: met by two consecutive points of every policy, or of the one it names.

    `measure` is `heldout`, `reward`, or the name of an episode metric; `subject` is a policy or role, empty for all.
    """

    text: str
    subject: str
    measure: str
    compare: Callable[[float, float], bool]
    bound: float

    def met(self, observation: Observation) -> bool:
        """Whether the last two evaluations (or steps, for `reward`) of every policy satisfy the condition.

        Raises InvalidArgumentError when evaluations do not have the metric that it names.
        """
        policies = observation.policies()
        if self.subject in policies:
            policies = [self.subject]
        return bool(policies) and all(self._met_by(observation, policy) for policy in policies)

    def _met_by(self, observation: Observation, policy: str) -> bool:
        last = self._points(observation, policy)[-_CONSECUTIVE:]
        return len(last) == _CONSECUTIVE and all(self.compare(value, self.bound) for value in last)

    def _points(self, observation: Observation, policy: str) -> list[float]:
        if self.measure == _REWARD:
            return [point.metrics.get("reward_mean", 0.0) for point in observation.steps_of(policy)]
        return [self._value(item) for item in observation.evaluations(policy)]

    def _value(self, item: admin_service_pb2.Evaluation) -> float:
        if self.measure == _HELDOUT:
            of_role = {role.role: role.mean_reward for role in item.roles}
            return of_role.get(self.subject, item.mean_reward)
        if self.measure not in item.metrics and not item.num_samples:
            return math.nan
        if self.measure not in item.metrics:
            known = ", ".join(sorted(item.metrics)) or "none"
            raise InvalidArgumentError(
                f"--until {self.text!r}: evaluations have no metric {self.measure!r}; they have {known}, and "
                f"{_HELDOUT} and {_REWARD}"
            )
        return item.metrics[self.measure]


def parse_goal(text: str, *, subjects: Collection[str]) -> Goal:
    """Parse `heldout>=0.7`, `verifier.heldout>=0.8`, `reward>=0.9` or `team>=0.9`, an episode metric; a bare number
    means held-out reward. `subjects` are the policies and roles that may be named. Raises InvalidArgumentError.
    """
    match = _GOAL.match(text) or _GOAL.match(f"{_HELDOUT}>={text}")
    if match is None:
        raise InvalidArgumentError(
            f"--until {text!r} is not a condition; write heldout>=0.7, {next(iter(subjects), 'solver')}.heldout>=0.7, "
            "reward>=0.9, or an episode metric such as team>=0.9"
        )
    subject, measure, symbol, bound = match.groups()
    if subject and measure in (_HELDOUT, _REWARD) and subject not in subjects:
        raise InvalidArgumentError(
            f"--until {text!r}: there is no trained policy or role {subject!r}; there are {', '.join(subjects)}"
        )
    if subject and measure not in (_HELDOUT, _REWARD):
        # Metrics of trajectories are called `role.name`.
        subject, measure = "", f"{subject}.{measure}"
    return Goal(
        text=text, subject=subject or "", measure=measure, compare=_OPERATORS[symbol], bound=float(bound)
    )
