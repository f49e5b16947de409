"""What a node adds to a lease before it runs it: a check, the recipe's sampling, and the seed of each call.

Invariant: a lease that `complete_lease` let pass has distinct members, sampling for every policy of the run and task
data that plug-ins can read; one that it refuses raises before any work starts. Called by `session`, and by whoever
makes a call of an episode.
"""

import hashlib
from collections.abc import Mapping

from astraflow.chat import task_from_proto
from astraflow.errors import InvalidArgumentError
from astraflow.plugins import TaskSpec
from astraflow.rollout.v1 import task_pb2


def complete_lease(lease: task_pb2.Lease, *, sampling: Mapping[str, task_pb2.SamplingParams]) -> TaskSpec:
    """Fill in what the lease leaves to the recipe's `sampling` (per policy), and return its task for plug-ins.

    Raises InvalidArgumentError for task data that is not a JSON object or members that repeat.
    """
    members = list(lease.members)
    if not members or len(set(members)) != len(members):
        raise InvalidArgumentError(
            f"lease {lease.lease_id} names members {members}; expected distinct ones, at least one"
        )
    for policy_id, default in sampling.items():
        params = lease.sampling.get(policy_id, default)
        lease.sampling[policy_id].CopyFrom(_without_zeros(params, default))
    try:
        return task_from_proto(lease.task)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error


def is_evaluation(lease: task_pb2.Lease) -> bool:
    """Whether the lease's episodes judge a version instead of being trained on."""
    return lease.task.purpose == task_pb2.PURPOSE_EVALUATION


def call_seed(lease: task_pb2.Lease, *, member: int, role: str, call: int) -> int:
    """Sampling seed of one call of one episode: equal on every node and attempt, in [0, 2^31)."""
    text = f"{lease.seed}/{member}/{role}/{call}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def _without_zeros(
    params: task_pb2.SamplingParams, default: task_pb2.SamplingParams
) -> task_pb2.SamplingParams:
    """Zeros of the contract mean: no nucleus cut, the recipe's length."""
    return task_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens or default.max_new_tokens,
    )
