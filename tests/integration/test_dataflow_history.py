"""What a run looked like: the figures of its steps, what happened to it, and who waits for whom."""

import math

import pytest
from structlog.testing import capture_logs

from astraflow import errors
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_SKIPPED as SKIPPED
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow_dataflow.status.step_history import MAX_SERIES
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_texts
from support.dataflow_world import World


async def steps(world: World, **asked: object) -> dict[str, list[float]]:
    """The series of the policy by name, with the steps as `steps`."""
    found = await world.ask(admin.ListStepsResponse, policy_id="solver", **asked)
    return {"steps": list(found.steps), **{each.name: list(each.mean) for each in found.series}}


async def trained(world: World, *figures: dict[str, float], stage: int = TRAINED) -> None:
    """Take a step for each of these figures."""
    trainer, node = await world.started(dataset="Counting")
    for step, metrics in enumerate(figures, 1):
        await node.work(2, version=step - 1)
        batch = (await trainer.acquire(step, base_version=step - 1)).batch
        await trainer.ack(batch, stage, metrics=metrics)
        await trainer.publish(version=step, step=step)


async def test_the_figures_of_each_step_are_kept_in_order_with_what_the_server_counts(world: World) -> None:
    await trained(world, {"reward_mean": 0.25, "wait_s": 1.0}, {"reward_mean": 0.5, "loss": 2.0})
    found = await steps(world)
    assert found["steps"] == [1, 2]
    assert found["reward_mean"] == [0.25, 0.5]
    assert found["loss"] == pytest.approx([math.nan, 2.0], nan_ok=True)
    assert len(found["data.ready"]) == len(found["data.ingested"]) == 2
    assert await steps(world, min_step=2, names=["reward_mean"]) == {"steps": [2], "reward_mean": [0.5]}


async def test_calls_of_tools_and_those_that_failed_are_counted_once_an_accepted_episode(
    world: World,
) -> None:
    trainer, node = await world.started(dataset="Counting")
    used = {"environment.tool_calls": 3.0, "environment.tool_errors": 1.0}
    (first, second) = await node.lease(2)
    episode = node.episode(first, 0, reward=0.0, metrics=used)
    assert [await node.outcome(episode) for _ in range(2)] == ["ACCEPTED", "DUPLICATE"]
    assert await node.outcome(node.episode(first, 0, episode_id="other", metrics=used)) == "SUPERSEDED"
    assert await node.outcome(node.episode(first, 1, reward=1.0)) == "ACCEPTED"
    absurd = {"environment.tool_calls": 1e6, "environment.tool_errors": -5.0}
    await node.complete(second, metrics=absurd)  # at most a million an episode
    batch = (await trainer.acquire(1)).batch
    await trainer.ack(batch, TRAINED, metrics={"reward_mean": 0.5})
    found = await steps(world)
    assert found["data.tool_calls"] == [3 + len(second.members) * 1_000_000]
    assert found["data.tool_errors"] == [1]


async def test_a_step_that_is_acked_again_is_kept_once_as_it_was_first(world: World) -> None:
    trainer, _, batch = await world.bound()
    for reward in (0.25, 0.75):
        await trainer.ack(batch, TRAINED, metrics={"reward_mean": reward})
    assert (await steps(world))["reward_mean"] == [0.25]


async def test_a_skipped_step_is_part_of_the_series(world: World) -> None:
    trainer, _, batch = await world.bound()
    await trainer.ack(batch, SKIPPED, metrics={"skipped": 1.0})
    assert (await steps(world))["skipped"] == [1.0]


async def test_a_trainer_that_tells_nothing_still_has_steps(world: World) -> None:
    await trained(world, {}, {"reward_mean": 1.0})
    found = await steps(world)
    assert found["steps"] == [1, 2]
    assert found["reward_mean"] == pytest.approx([math.nan, 1.0], nan_ok=True)


async def test_names_that_every_step_brings_anew_take_no_more_room_than_the_first_of_them(
    world: World,
) -> None:
    lasting = {"reward_mean": 1.0}
    brought = [lasting | {f"{step}-{number:0200d}": 1.0 for number in range(255)} for step in range(1, 31)]
    with capture_logs() as lines:
        await trained(world, lasting, *brought, lasting)
        found = await steps(world)
        await steps(world)
    assert found["steps"] == list(range(1, 33))
    assert found["reward_mean"][0] == found["reward_mean"][-1] == 1.0
    assert len([name for name in found if not name.startswith("data.")]) - 1 <= MAX_SERIES
    (line,) = [line for line in lines if line["event"] == "steps.too_many_names"]
    assert line["first_left_out"].startswith("2-")
    names = Keys(world.run_id).of("series_names", "solver")
    kept = as_texts(await world.dataflow.connection.raw("HKEYS", names))
    assert sum(map(len, kept)) <= 2**20


async def test_a_run_without_a_step_has_no_points_and_no_verdict(world: World) -> None:
    await world.started(dataset="Counting")
    assert await steps(world) == {"steps": []}
    assert not (await world.status()).balances


async def test_figures_that_are_no_finite_numbers_and_unknown_policies_are_refused(world: World) -> None:
    trainer, _, batch = await world.bound()
    with pytest.raises(errors.InvalidArgumentError, match="metrics"):
        await trainer.ack(batch, TRAINED, metrics={"reward_mean": math.nan})
    with pytest.raises(errors.NotFoundError, match="nobody"):
        await world.ask(admin.ListStepsResponse, policy_id="nobody")


async def test_status_and_why_say_who_waits_for_whom(world: World) -> None:
    await trained(world, {"wait_s": 6.0, "train_s": 4.0})
    for answer in (await world.status(), await world.why()):
        (verdict,) = answer.balances
        assert (verdict.policy_id, verdict.verdict, verdict.num_steps) == ("solver", "rollout_bound", 1)
        assert "the trainer waits 60%" in verdict.sentence


async def test_the_timeline_tells_joins_trainers_drains_and_the_life_of_the_run_newest_first(
    world: World,
) -> None:
    _, node = await world.started(dataset="Counting")
    await world.ask(admin.DrainNodeResponse, node_id=node.node_id, reason="maintenance")
    found = await world.ask(admin.ListEventsResponse)
    told = [(event.kind, event.subject) for event in found.events]
    assert told == [
        ("node_drained", node.node_id),
        ("node_joined", node.node_id),
        ("trainer_claimed", "solver"),
    ]
    assert found.events[0].detail == "maintenance"
    first = await world.ask(admin.ListEventsResponse, page_size=1)
    rest = await world.ask(admin.ListEventsResponse, page_token=first.next_page_token)
    assert [*first.events, *rest.events] == list(found.events)
    assert not (await world.ask(admin.ListEventsResponse, page_token="0-0")).events
