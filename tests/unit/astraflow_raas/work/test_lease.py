"""A lease as values: complete, checked, and the only source of sampling seeds."""

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow.plugins import Message
from astraflow.rollout.v1 import task_pb2
from astraflow_raas.work.lease import Sampling, read_lease
from support.raas_parts import SAMPLING, leased
from support.scripted_dataflow import lease

DEFAULTS = {"solver": SAMPLING}


def test_a_lease_is_read_whole() -> None:
    read = read_lease(lease(members=(1, 3), attempt=2, ttl_s=2.5), default_sampling=DEFAULTS)
    assert (read.lease_id, read.attempt, read.members, read.ttl_s) == ("task-1#2", 2, (1, 3), 2.5)
    assert read.task.messages == (Message("user", "3 + 4?"),)
    assert read.task.data == {"answer": "7"}
    assert not read.evaluation


def test_an_evaluation_names_its_exact_versions() -> None:
    read = read_lease(lease(required_versions={"solver": 4}), default_sampling=DEFAULTS)
    assert read.evaluation
    assert read.required_versions == {"solver": 4}


def test_sampling_comes_from_the_lease_and_else_from_the_recipe() -> None:
    message = lease()
    assert read_lease(message, default_sampling=DEFAULTS).sampling == DEFAULTS
    message.sampling["solver"].CopyFrom(task_pb2.SamplingParams(temperature=0.5, top_k=3))
    read = read_lease(message, default_sampling=DEFAULTS)
    # Zeros of the contract mean: no nucleus cut, the recipe's length.
    assert read.sampling["solver"] == Sampling(temperature=0.5, top_p=1.0, top_k=3, max_new_tokens=8)


@pytest.mark.parametrize("members", [(), (1, 1)])
def test_members_are_distinct_and_at_least_one(members: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="members"):
        read_lease(lease(members=members), default_sampling=DEFAULTS)


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff"])
def test_task_data_is_a_json_object(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="data_json"):
        read_lease(lease(data_json=data), default_sampling=DEFAULTS)


def test_a_call_has_the_same_seed_on_every_node_and_attempt_and_no_two_calls_share_one() -> None:
    first, second = leased(attempt=1), leased(attempt=2)
    assert first.call_seed(0, "solver", 0) == second.call_seed(0, "solver", 0)
    seeds = {
        first.call_seed(member, policy, call)
        for member in range(8)
        for policy in ("solver", "critic")
        for call in range(4)
    }
    assert len(seeds) == 64
    assert all(0 <= seed < 2**31 for seed in seeds)
