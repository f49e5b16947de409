"""A trainer that is not ours gets what it can train on, and gives back the rest, over real gRPC."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from astraflow import errors
from astraflow.training.claimed import ClaimedPolicy
from support.scripted_batches import ScriptedBatches, batch_of, serving

# Groups of the scripted batch: one task. This makes a group of its own of the second trajectory.
APART: Callable[[Any], object] = lambda batch: setattr(batch.items[1], "task_id", "other")  # noqa: E731


@pytest.fixture
def script() -> ScriptedBatches:
    return ScriptedBatches()


@pytest.fixture
def policy(script: ScriptedBatches) -> Iterator[ClaimedPolicy]:
    with serving(script) as client:
        yield ClaimedPolicy(client, trainer_id="mine")


def test_a_batch_comes_as_columns_after_its_intent_is_recorded(
    policy: ClaimedPolicy, script: ScriptedBatches
) -> None:
    script.empty_polls.append("ready_groups")
    batch = policy.next_batch(step=1, base_version=0)
    assert [(row.item.trajectory_id, row.item.reward) for row in batch.rows] == [("t1-0", 0.0), ("t1-1", 1.0)]
    assert [row.columns.token_ids.tolist() for row in batch.rows] == [[1, 2, 3]] * 2
    assert batch.left_out == ()
    policy.trained(batch)
    policy.durable(1)
    assert script.events[1:] == ["acquire 1", "fetch 1", "intent 1", "trained 1", "durable 1"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda batch: batch.items.pop(), "digest_mismatch"),
        (lambda batch: setattr(batch, "policy_id", "judge"), "wrong_policy"),
        (lambda batch: setattr(batch, "step", 7), "wrong_step"),
        (lambda batch: batch.ClearField("items"), "empty"),
        (lambda batch: [setattr(item, "max_version", 9) for item in batch.items], "future_version"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_given_back_with_the_reason_and_the_next_one_taken(
    policy: ClaimedPolicy, script: ScriptedBatches, spoil: Callable[[Any], object], reason: str
) -> None:
    script.spoiled_batches.append(spoil)
    assert policy.next_batch(step=1, base_version=0).bound == batch_of(1)
    told = [event for event in script.events if not event.startswith("fetch")]
    assert told[1:] == ["acquire 1", f"nack 1 b1 {reason}", "acquire 1", "intent 1"]


def test_a_bad_payload_costs_its_group_alone(policy: ClaimedPolicy, script: ScriptedBatches) -> None:
    script.spoil["t1-0"] = lambda _: b"\xff\xff"
    script.spoiled_batches.append(APART)
    batch = policy.next_batch(step=1, base_version=0)
    assert [row.item.trajectory_id for row in batch.rows] == ["t1-1"]
    (problem,) = batch.left_out
    assert (problem.slug, "t1-0" in problem.detail) == ("bad_body", True)
    assert not any(event.startswith("nack") for event in script.events)


def test_a_batch_whose_payloads_are_all_gone_is_given_back(
    policy: ClaimedPolicy, script: ScriptedBatches
) -> None:
    script.gone.update({"t1-0", "t1-1"})
    with pytest.raises(errors.InternalError, match=r"payload_missing: none of .*; so were the 3 before it"):
        policy.next_batch(step=1, base_version=0)
    assert script.events.count("nack 1 b1 payload_missing") == 3
    assert script.acks == []


def test_a_batch_that_was_trained_on_is_never_given_back(
    policy: ClaimedPolicy, script: ScriptedBatches
) -> None:
    script.last_finished_step = 1
    script.spoiled_batches.append(lambda batch: batch.items.pop())
    with pytest.raises(errors.InternalError, match="the step was trained on it"):
        policy.next_batch(step=1, base_version=0)
    assert not any(event.startswith("nack") for event in script.events)
