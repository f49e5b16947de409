"""What the launcher has observed of a run, made by hand."""

from collections.abc import Sequence
from typing import Any

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow_launcher.view.observation import Observation


def evaluation(version: int, reward: float, *, policy: str = "solver", **fields: Any) -> admin.Evaluation:
    """A complete evaluation of a version."""
    good: dict[str, Any] = {"policy_id": policy, "version": version, "mean_reward": reward, "complete": True}
    return admin.Evaluation(**(good | fields))


def observed(
    *evaluations: admin.Evaluation,
    policies: Sequence[str] = ("solver",),
    frozen: Sequence[str] = (),
    **fields: Any,
) -> Observation:
    """A run with these policies, trained and not, and evaluations."""
    statuses = [admin.PolicyStatus(policy_id=name, frozen=name in frozen) for name in (*policies, *frozen)]
    status = admin.StatusResponse(policies=statuses, evaluations=evaluations)
    return Observation(status=status, **fields)
