"""A lease is complete and checked before it is run, and the only source of sampling seeds."""

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow.plugins import Message
from astraflow.rollout.v1 import task_pb2
from astraflow_raas.work.lease import call_seed, complete_lease, is_evaluation
from support.raas_parts import SAMPLING
from support.scripted_dataflow import lease

DEFAULTS = {"solver": SAMPLING}


def test_plug_ins_get_the_task_without_the_contract() -> None:
    task = complete_lease(lease(), sampling=DEFAULTS)
    assert task.task_id == "task-1"
    assert task.messages == (Message("user", "3 + 4?"),)
    assert task.data == {"answer": "7"}


def test_a_lease_is_of_an_evaluation_or_of_training() -> None:
    assert is_evaluation(lease(required_versions={"solver": 4}))
    assert not is_evaluation(lease())


def test_sampling_comes_from_the_lease_and_else_from_the_recipe() -> None:
    bare, own = lease(), lease()
    complete_lease(bare, sampling=DEFAULTS)
    assert bare.sampling["solver"] == SAMPLING
    own.sampling["solver"].CopyFrom(task_pb2.SamplingParams(temperature=0.5, top_k=3))
    complete_lease(own, sampling=DEFAULTS)
    # Zeros of the contract mean: no nucleus cut, the recipe's length.
    wanted = task_pb2.SamplingParams(temperature=0.5, top_p=1.0, top_k=3, max_new_tokens=8)
    assert own.sampling["solver"] == wanted


@pytest.mark.parametrize("members", [(), (1, 1)])
def test_members_are_distinct_and_at_least_one(members: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="members"):
        complete_lease(lease(members=members), sampling=DEFAULTS)


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff"])
def test_task_data_is_a_json_object(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="data_json"):
        complete_lease(lease(data_json=data), sampling=DEFAULTS)


def test_a_call_has_the_same_seed_on_every_node_and_attempt_and_no_two_calls_share_one() -> None:
    calls = [(m, p, c) for m in range(8) for p in ("solver", "critic") for c in range(4)]
    first = [call_seed(lease(attempt=1), member=m, role=p, call=c) for m, p, c in calls]
    assert first == [call_seed(lease(attempt=2), member=m, role=p, call=c) for m, p, c in calls]
    assert len(set(first)) == 64
    assert all(0 <= seed < 2**31 for seed in first)
