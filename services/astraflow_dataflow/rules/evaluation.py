"""Evaluation: which versions are evaluated, on how many held-out tasks, and when one is given up.

Version 0, every N-th version and the final one, each at exactly its version. Pure. Ids are derived, so
planning twice is harmless, and a task's id alone says which version it demands. Called by the run loop,
ingest and leasing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from astraflow.recipe import EvaluationSettings
from astraflow_dataflow.records import StoredEvaluation

TASK_PREFIX = "eval:"
"""Task ids of this form are the server's own; submitted tasks may not use it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One evaluation to make."""

    policy_id: str
    version: int
    planned: int
    final: bool

    @property
    def evaluation_id(self) -> str:
        """The evaluation's id in its run."""
        return f"{self.policy_id}:{self.version}:{'final' if self.final else 'periodic'}"


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What an evaluation task demands of the trajectories of one policy."""

    policy_id: str
    version: int


def plan_version(policy_id: str, version: int, *, settings: EvaluationSettings) -> Plan | None:
    """Return the evaluation due for a newly announced version, or None."""
    if version == 0:
        return Plan(policy_id=policy_id, version=0, planned=settings.final_samples, final=False)
    if settings.every_versions and version % settings.every_versions == 0:
        return Plan(policy_id=policy_id, version=version, planned=settings.num_samples, final=False)
    return None


def plan_final(policy_id: str, version: int, *, settings: EvaluationSettings) -> Plan:
    """Return the final evaluation at the newest version."""
    return Plan(policy_id=policy_id, version=version, planned=settings.final_samples, final=True)


def task_id(evaluation_id: str, index: int) -> str:
    """Return the id of an evaluation's task for held-out index `index`."""
    return f"{TASK_PREFIX}{evaluation_id}:{index}"


def is_evaluation_task(identifier: str) -> bool:
    """Return whether a task id is one of the server's evaluation tasks."""
    return identifier.startswith(TASK_PREFIX)


def demand_of(identifier: str) -> Demand | None:
    """Return what an evaluation task's id demands; None for training tasks and malformed ids."""
    parts = identifier.removeprefix(TASK_PREFIX).split(":")
    if not is_evaluation_task(identifier) or len(parts) != 4 or not parts[1].isdigit():
        return None
    return Demand(policy_id=parts[0], version=int(parts[1]))


def is_superseded(evaluation: StoredEvaluation, *, newest_version: int | None) -> bool:
    """Return whether nodes have a newer version to go to, so that the evaluation may never get a node again."""
    return newest_version is not None and newest_version > evaluation.version


def must_give_up(
    evaluation: StoredEvaluation, *, newest_version: int | None, idle_s: float, patience_s: float
) -> bool:
    """Return whether an open evaluation without progress for `idle_s` is given up.

    A superseded one is, after `patience_s`. A final one gives way to a newer version only, and at once: its
    successor is planned.
    """
    if evaluation.state != "open" or not is_superseded(evaluation, newest_version=newest_version):
        return False
    return evaluation.final or idle_s >= patience_s


def finals_complete(evaluations: Iterable[StoredEvaluation], *, newest: dict[str, int]) -> bool:
    """Return whether every policy's newest version has a completed final evaluation."""
    done = {(item.policy_id, item.version) for item in evaluations if item.final and item.state == "complete"}
    return all((policy_id, version) in done for policy_id, version in newest.items())
