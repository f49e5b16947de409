"""A lease as the node works with it: plain frozen values read once from the contract's message.

Invariant: what `read_lease` returns is complete (sampling for every policy of the run, bounded members,
decoded task data); a lease that is not raises before any work starts. Called by `worker`; read by `session`
and `episode`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.errors import InvalidArgumentError
from astraflow.plugins import Message, TaskSpec
from astraflow.rollout.v1 import task_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one policy samples. `temperature` 0 is greedy, `top_k` 0 keeps all, `top_p` in (0, 1]."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int

    def to_proto(self) -> task_pb2.SamplingParams:
        """The contract's form."""
        return task_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedTask:
    """The right to run `members` of `task` as attempt number `attempt`."""

    lease_id: str
    run_id: str
    task: TaskSpec
    attempt: int
    members: tuple[int, ...]
    ttl_s: float
    sampling: Mapping[str, Sampling]
    required_versions: Mapping[str, int]
    seed: int
    evaluation: bool

    def call_seed(self, member: int, policy: str, call: int) -> int:
        """Sampling seed of one call of one episode: equal on every node and attempt, in [0, 2^31)."""
        text = f"{self.seed}/{member}/{policy}/{call}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def read_lease(message: task_pb2.Lease, *, default_sampling: Mapping[str, Sampling]) -> LeasedTask:
    """Return the lease as values; policies without sampling in it use the recipe's.

    Raises InvalidArgumentError for task data that is not a JSON object or members that repeat.
    """
    members = tuple(message.members)
    if not members or len(set(members)) != len(members):
        raise InvalidArgumentError(
            f"lease {message.lease_id} names members {members}; expected distinct ones, at least one"
        )
    given = {name: _sampling(params, default_sampling.get(name)) for name, params in message.sampling.items()}
    return LeasedTask(
        lease_id=message.lease_id,
        run_id=message.run_id,
        task=_task(message.task),
        attempt=message.attempt,
        members=members,
        ttl_s=message.ttl_duration.ToNanoseconds() / 1e9,
        sampling={**default_sampling, **given},
        required_versions=dict(message.required_versions),
        seed=message.seed,
        evaluation=message.task.purpose == task_pb2.PURPOSE_EVALUATION,
    )


def _task(message: task_pb2.Task) -> TaskSpec:
    messages = tuple(Message(item.role, item.content) for item in message.messages)
    return TaskSpec(message.task_id, messages, _data(message), source=message.source)


def _data(message: task_pb2.Task) -> Mapping[str, object]:
    try:
        data = json.loads(message.data_json) if message.data_json else {}
    except ValueError as error:
        raise InvalidArgumentError(f"task {message.task_id}: data_json is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidArgumentError(
            f"task {message.task_id}: data_json is {type(data).__name__}, expected an object"
        )
    return data


def _sampling(params: task_pb2.SamplingParams, default: Sampling | None) -> Sampling:
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens or (default.max_new_tokens if default else 256),
    )
