"""Evaluation: when a pass over tasks is due, at which versions, whose turn it is, and when one is given up.

A pass evaluates all trained policies in the same episodes, at one version of each: the newest ones when it is planned,
or those that a request names. One pass is open at a time, and nodes get no newer version while it is. Pure. Ids are
derived, so planning twice is harmless, and a task's id alone says which versions it demands. Called by the run loop,
ingest and leasing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astraflow.recipe import EvaluationSettings
from astraflow_dataflow.records import StoredEvaluation

TASK_PREFIX = "eval:"
"""Task ids of this form are the server's own; submitted tasks may not use it."""
_MAX_HOLD = 4
"""How many patiences a pass may hold newer versions back, however it progresses."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One pass to make. `versions` has each trained policy of the run, in the recipe's order."""

    versions: Mapping[str, int]
    planned: int
    """Samples, `samples_per_task` of each held-out task."""
    samples_per_task: int = 1
    final: bool

    @property
    def evaluation_id(self) -> str:
        """The pass's id in its run."""
        return f"{'.'.join(map(str, self.versions.values()))}:{'final' if self.final else 'periodic'}"


def plan_periodic(
    newest: Mapping[str, int], passes: Sequence[StoredEvaluation], *, settings: EvaluationSettings
) -> Plan | None:
    """Return the pass that is due at the newest versions: the first one, or that of each N-th version of a policy."""
    own = [item for item in passes if not item.requested]
    if not own:
        return _plan(newest, settings.final_samples, settings=settings)
    every = settings.every_versions
    last = {policy_id: max(item.versions.get(policy_id, 0) for item in own) for policy_id in newest}
    if every and any(version // every > last[policy_id] // every for policy_id, version in newest.items()):
        return _plan(newest, settings.num_samples, settings=settings)
    return None


def next_request(
    newest: Mapping[str, int], passes: Sequence[StoredEvaluation], *, is_periodic_due: bool
) -> StoredEvaluation | None:
    """Return the request whose turn it is, or None when none waits or the recipe's pass comes first.

    The oldest that names a version which is not the newest any more comes before all others, for nodes are held back
    for it; else the oldest, and requests and passes of the recipe take turns. `passes` are in the order in which they
    began, or were asked for.
    """
    waiting = [item for item in passes if item.state == "waiting"]
    behind = [item for item in waiting if is_superseded(item, newest=newest)]
    begun = [item for item in passes if item.state != "waiting"]
    if not behind and is_periodic_due and (not begun or begun[-1].requested):
        return None
    return next(iter([*behind, *waiting]), None)


def plan_final(newest: Mapping[str, int], *, settings: EvaluationSettings) -> Plan:
    """Return the final pass at the newest versions."""
    return _plan(newest, settings.final_samples, settings=settings, final=True)


def _plan(
    versions: Mapping[str, int], num_tasks: int, *, settings: EvaluationSettings, final: bool = False
) -> Plan:
    each = settings.samples_per_task
    return Plan(versions=versions, planned=num_tasks * each, samples_per_task=each, final=final)


def task_id(stem: str, index: int) -> str:
    """Return the id of the task that is sample number `index` of a pass; sample i is of the pass's task i // k."""
    return f"{TASK_PREFIX}{stem}:{index}"


def sample_index(identifier: str) -> int:
    """Return which sample of its pass an evaluation task is."""
    return int(identifier.rpartition(":")[2])


def is_evaluation_task(identifier: str) -> bool:
    """Return whether a task id is one of the server's evaluation tasks."""
    return identifier.startswith(TASK_PREFIX)


def demand_of(identifier: str, policies: Sequence[str]) -> Mapping[str, int]:
    """Return the version that an evaluation task demands of each of the run's trained `policies`; empty for training
    tasks and malformed ids.
    """
    parts = identifier.removeprefix(TASK_PREFIX).split(":")
    numbers = parts[0].split(".")
    if not is_evaluation_task(identifier) or len(parts) != 3 or not all(map(str.isdigit, numbers)):
        return {}
    return dict(zip(policies, map(int, numbers), strict=True)) if len(numbers) == len(policies) else {}


def is_superseded(evaluation: StoredEvaluation, *, newest: Mapping[str, int]) -> bool:
    """Return whether a newer version waits for the pass to end."""
    return any(newest.get(policy_id, -1) > version for policy_id, version in evaluation.versions.items())


def must_give_up(
    evaluation: StoredEvaluation,
    *,
    newest: Mapping[str, int],
    idle_s: float,
    held_s: float,
    patience_s: float,
) -> bool:
    """Return whether an open pass that newer versions wait for is given up with what it has: after `patience_s` without
    progress, or when it has held them for several times as long. A final one is at once: its successor is planned.
    """
    if evaluation.state != "open" or not is_superseded(evaluation, newest=newest):
        return False
    return evaluation.final or idle_s >= patience_s or held_s >= _MAX_HOLD * patience_s


def finals_complete(evaluations: Sequence[StoredEvaluation], *, newest: Mapping[str, int]) -> bool:
    """Return whether the newest versions have a completed final pass."""
    return any(item.final and item.state == "complete" and item.versions == newest for item in evaluations)
