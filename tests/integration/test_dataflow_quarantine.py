"""A batch that nobody can train on leaves the run by name: its groups are dropped, and the step takes others."""

import pytest

from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_INTENT as INTENT
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.errors import NotFoundError, PreconditionError
from astraflow.rollout.v1.trajectory_pb2 import Trajectory
from astraflow.trajectories import check_body
from astraflow_dataflow.store.keys import Keys
from support.dataflow_world import World


async def test_a_quarantined_batch_is_dropped_by_name_and_the_step_takes_other_groups(world: World) -> None:
    trainer, node, batch = await world.bound()
    await trainer.ack(batch, INTENT)
    assert await trainer.quarantine(1, batch.batch_id) == 4
    await world.has_account(ingested=4, dropped={"quarantined": 4}, in_batch=0, ready=0)
    assert await trainer.quarantine(1) == 0, "a repetition finds nothing"
    why = await world.why(batch.items[0].task_id)
    assert {item.drop_reason for item in why.task.trajectories} == {"quarantined: digest_mismatch"}
    await node.work(2)
    again = (await trainer.acquire(1)).batch
    assert again.batch_id != batch.batch_id
    assert not {item.group_id for item in again.items} & {item.group_id for item in batch.items}
    assert await trainer.quarantine(1, batch.batch_id) == 0, "it is another batch that is bound now"
    assert await trainer.ack(again, TRAINED) == TRAINED
    await world.has_account(ingested=8, trained=4, dropped={"quarantined": 4})
    assert (await (await world.trainer()).acquire(1)).batch == again, (
        "who resumes replays what was trained on"
    )


async def test_a_run_is_stopped_when_more_batches_in_a_row_fail_in_training_than_the_recipe_allows(
    world: World,
) -> None:
    trainer, node, _ = await world.bound(overrides=["dataflow.max_failed_batches=1"])

    async def fails(step: int, place: str) -> None:
        bound = (await trainer.acquire(step)).batch
        await trainer.ack(bound, INTENT)
        detail = f"step {step} failed 2 times alike: ValueError: no (recipe.py:{place} in __call__)"
        assert await trainer.quarantine(step, bound.batch_id, reason="step_failed", detail=detail) == 4
        assert await trainer.quarantine(step, bound.batch_id, reason="step_failed", detail=detail) == 0

    await fails(1, "17")
    await node.make_ready(2)
    await trainer.ack((await trainer.acquire(1)).batch, INTENT)
    await trainer.ack((await trainer.acquire(1)).batch, TRAINED)
    assert not (await world.why()).stopped_for, "a step was finished between them"
    await node.make_ready(2)
    await fails(2, "18")
    failures = (await world.why()).failures
    assert [(item.in_a_row, item.count, item.task_id) for item in failures] == [(1, 2, "")]
    await node.make_ready(2)
    await fails(2, "17")
    stopped = (await world.why()).stopped_for
    assert stopped.startswith(
        "2 batches of solver in a row failed in training (dataflow.max_failed_batches is 1)"
    )
    assert "ValueError: no (recipe.py:17 in __call__)" in stopped
    assert (await trainer.acquire(2)).waiting_for == "run_finished"
    events = await world.ask(admin.ListEventsResponse)
    assert [event.kind for event in events.events].count("batch_quarantined") == 3
    await world.resume()
    assert (await world.why()).stopped_for == ""
    await node.make_ready(2)
    await fails(2, "19")
    assert (await world.why()).stopped_for == "", "a run that is continued counts anew"


async def test_a_batch_that_was_trained_on_cannot_be_quarantined(world: World) -> None:
    trainer, _, batch = await world.bound()
    await trainer.ack(batch, TRAINED)
    with pytest.raises(PreconditionError, match="step 1 is trained"):
        await trainer.quarantine(1, batch.batch_id)
    await world.has_account(trained=4)


async def test_a_payload_that_is_gone_is_named_and_the_others_can_be_fetched(world: World) -> None:
    trainer, _, batch = await world.bound()
    lost, *others = [item.trajectory_id for item in batch.items]
    store = world.dataflow.store
    (place,) = await store.payloads.places("run", [lost])
    assert await store.connection.raw("UNLINK", Keys("run").of("payload", place.text, lost)) == 1
    with pytest.raises(NotFoundError, match="gone") as refused:
        await trainer.fetch(1)
    assert refused.value.metadata["payload_missing"] == lost
    assert [item.trajectory_id for item in await trainer.fetch(1, *others)] == others


async def test_an_item_says_of_a_payload_what_its_digest_is(world: World) -> None:
    trainer, _, batch = await world.bound()
    for item, payload in zip(batch.items, await trainer.fetch(1), strict=True):
        assert check_body(payload.body, item)[1] == item.response_digest
        trajectory = Trajectory.FromString(payload.body)
        tokens = decode_columns(trajectory).token_ids.copy()
        tokens[-1] += 1
        trajectory.token_ids = tokens.tobytes()
        assert check_body(trajectory.SerializeToString(), item)[1] != item.response_digest
