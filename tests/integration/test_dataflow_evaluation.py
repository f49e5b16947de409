"""Evaluation: exactly the version it names, before training, aggregated and never trained on; and how a
run finishes.
"""

import asyncio
import math
from typing import Any

import pytest

from astraflow.dataflow.v1 import admin_service_pb2, evaluation_service_pb2, run_pb2, trajectory_service_pb2
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.errors import NotFoundError
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import Life
from support.dataflow_world import Node, Trainer, World, make_trajectory, served, until

EVERY_VERSION = "{every_versions: 1, num_samples: 2, final_samples: 3}"
FIRST_ONLY = "{every_versions: 0, num_samples: 2, final_samples: 3}"


async def started(world: World, *, evaluation: str = FIRST_ONLY, **recipe: object) -> tuple[Trainer, Node]:
    """A run with held-out tasks, version 0 and a node that serves it."""
    trainer, node = await world.started(**({"dataset": "Counting", "evaluation": evaluation} | recipe))
    node.serving, training[world.run_id] = {"solver": 0}, []
    await planned(world, 1)
    return trainer, node


async def planned(world: World, count: int) -> None:
    """Wait until that many evaluations exist with tasks to lease."""
    while True:
        stored = await world.dataflow.store.evaluations.all(world.run_id)
        if len(stored) >= count and all(item.fed for item in stored):
            return
        await asyncio.sleep(0.02)


async def evaluate(node: Node, *, reward: float = 1.0, version: int = 0) -> int:
    """Run every evaluation lease the node gets; return how many. Training leases wait in `training`."""
    total = 0
    while True:
        leases = await node.lease(16, wait_s=0)
        evaluating = [lease for lease in leases if lease.required_versions]
        training[node.world.run_id] += [lease for lease in leases if not lease.required_versions]
        await node.complete_all(evaluating, reward=reward, version=version)
        if not evaluating:
            return total
        total += len(evaluating)


training: dict[str, list[task_pb2.Lease]] = {}


async def training_leases(node: Node, count: int) -> list[task_pb2.Lease]:
    """Training leases: those met while evaluating first."""
    held = training[node.world.run_id]
    while len(held) < count:
        held += await node.lease(count - len(held))
    return [held.pop(0) for _ in range(count)]


async def train_step(trainer: Trainer, node: Node) -> None:
    """Train step 1 without announcing its version."""
    await node.complete_all(await training_leases(node, 2))
    await trainer.ack((await trainer.acquire(1)).batch, TRAINED)


async def evaluations(world: World) -> list[admin_service_pb2.Evaluation]:
    """The status' evaluations."""
    return list((await world.status()).evaluations)


async def test_version_zero_is_evaluated_before_anything_is_trained(world: World) -> None:
    _, node = await started(world)
    leases = await node.lease(4)
    assert [dict(lease.required_versions) for lease in leases] == [{"solver": 0}] * 3 + [{}]
    assert [lease.task.messages[0].content for lease in leases[:3]] == ["heldout-0", "heldout-1", "heldout-2"]
    assert {lease.task.group_size for lease in leases[:3]} == {1}
    for number, lease in enumerate(leases[:3]):
        assert await node.complete(lease, reward=float(number)) == ["ACCEPTED"]
    (found,) = await evaluations(world)
    assert (found.version, found.num_samples, found.num_planned, found.complete) == (0, 3, 3, True)
    assert (found.mean_reward, found.final) == (1.0, False)
    await world.has_account(ingested=3, evaluated=3)


async def test_an_evaluation_that_has_no_sample_yet_has_no_mean(world: World) -> None:
    await started(world)
    (found,) = await evaluations(world)
    assert (math.isnan(found.mean_reward), found.complete) == (True, False)


async def test_only_a_node_that_serves_exactly_the_version_evaluates(world: World) -> None:
    _, node = await started(world)
    node.serving = {"solver": 1}
    other = await world.node("n2")
    assert not any(lease.required_versions for lease in [*await node.lease(2), *await other.lease(1)])
    assert "no_node_at_version" in await world.waits()


async def test_an_evaluation_trajectory_of_another_version_is_poison(world: World) -> None:
    trainer, node = await started(world)
    (lease,) = await node.lease(1)
    await node.complete_all([item for item in await node.lease(16) if not item.required_versions])
    await trainer.train(1, base_version=0)
    result = await node.push(node.episode(lease, 0, version=1))
    assert (result.outcome, result.reason) == (trajectory_service_pb2.OUTCOME_POISON, "wrong_version")
    assert await node.complete(lease, version=0, episode_id="another-try") == ["ACCEPTED"]


async def test_a_repeated_evaluation_push_counts_once(world: World) -> None:
    _, node = await started(world)
    (lease,) = await node.lease(1)
    assert [await node.complete(lease) for _ in range(2)] == [["ACCEPTED"], ["DUPLICATE"]]
    assert [found.num_samples for found in await evaluations(world)] == [1]


async def test_a_lease_given_back_for_its_version_is_offered_again(world: World) -> None:
    _, node = await started(world)
    (lease,) = await node.lease(1)
    assert await node.fail(lease, "version_unavailable", retryable=False) is True
    again = [item for item in await node.lease(16, wait_s=5) if item.required_versions]
    assert lease.task.task_id in {item.task.task_id for item in again + await node.lease(16, wait_s=1)}


async def test_every_nth_version_is_evaluated_at_its_own_version(world: World) -> None:
    trainer, node = await started(world, evaluation=EVERY_VERSION)
    assert await evaluate(node) == 3
    await train_step(trainer, node)
    await trainer.publish(version=1, step=1)
    await planned(world, 2)
    assert await evaluate(node) == 0
    node.serving = {"solver": 1}
    assert await evaluate(node, version=1, reward=0.5) == 2
    found = await evaluations(world)
    assert [(item.version, item.num_samples, item.complete) for item in found] == [(0, 3, True), (1, 2, True)]


async def test_a_superseded_evaluation_nobody_can_serve_is_given_up_after_its_patience(
    redis_url: str, tmp_path: object
) -> None:
    async with served(redis_url, tmp_path, evaluation_patience_s=0.2) as world:  # type: ignore[arg-type]
        trainer, node = await started(world)
        (held,) = await node.lease(1)
        node.serving = {}
        await node.work(2)
        await trainer.train(1, base_version=0)
        await world.until(lambda status: status.evaluations[0].complete)
        assert (await evaluations(world))[0].num_samples == 0
        assert await node.complete(held) == ["LATE_CLOSED"]
        await world.has_account()


async def test_a_data_set_with_fewer_held_out_tasks_shrinks_the_plan(world: World) -> None:
    _, node = await started(world, dataset="Short")
    assert await evaluate(node) == 2
    (found,) = await evaluations(world)
    assert (found.num_planned, found.num_samples, found.complete) == (2, 2, True)


async def until_finished(world: World, node: Node, *, version: int = 0) -> None:
    """Run final evaluations until the run is finished."""

    async def is_finished() -> bool:
        await evaluate(node, version=version)
        return await world.is_finished()

    await until(is_finished)


async def test_a_finishing_run_evaluates_its_newest_version_and_ends(world: World) -> None:
    _, node = await started(world)
    await evaluate(node)
    (lease,) = await training_leases(node, 1)
    await node.push(node.episode(lease, 0))
    await world.finish()
    await until_finished(world, node)
    found = await evaluations(world)
    assert [(item.version, item.final, item.num_samples) for item in found] == [(0, False, 3), (0, True, 3)]
    assert await node.push(node.episode(lease, 1)) == await node.push(node.episode(lease, 1))
    await world.has_account(dropped={"run_finished": 1, "late_closed": 1})
    assert (await node.lease_reply()).waiting_for == "run_finished"


async def test_no_training_lease_is_given_while_a_run_finishes(world: World) -> None:
    _, node = await started(world)
    await world.finish()
    await planned(world, 2)
    assert all(lease.required_versions for lease in await node.lease(16))


async def test_the_final_evaluation_follows_a_version_announced_while_finishing(world: World) -> None:
    trainer, node = await started(world)
    await evaluate(node)
    await train_step(trainer, node)
    await world.finish()
    await planned(world, 2)
    await trainer.publish(version=1, step=1)
    node.serving = {"solver": 1}
    await until_finished(world, node, version=1)
    finals = [item for item in await evaluations(world) if item.final]
    assert [(item.version, item.num_samples) for item in finals] == [(0, 0), (1, 3)]
    assert all(item.complete for item in finals)


async def test_a_run_without_any_version_finishes_and_may_be_told_so_again(world: World) -> None:
    await world.create_run()
    await world.finish()
    await world.finish()
    await until(world.is_finished)
    await world.finish()
    assert (await world.status()).state == run_pb2.RUN_STATE_FINISHED


async def test_a_finished_run_is_continued_and_finishes_again(world: World) -> None:
    trainer, node = await started(world)
    await world.finish()
    await until_finished(world, node)
    await world.resume()
    await train_step(trainer, node)
    await trainer.publish(version=1, step=1)
    await world.finish()
    node.serving = {"solver": 1}
    await until_finished(world, node, version=1)
    finals = [item.version for item in await evaluations(world) if item.final]
    assert finals == [0, 1]
    await world.has_account()


async def test_a_run_continued_while_it_finishes_is_not_ended_by_who_saw_it_finishing(world: World) -> None:
    await started(world)
    await world.finish()
    await planned(world, 2)
    await world.resume()
    await world.dataflow.store.runs.advance(world.run_id, Life.FINISHED)
    assert (await world.status()).state == run_pb2.RUN_STATE_ACTIVE


BOTH = ("solver", "verifier")


async def test_one_pass_evaluates_all_policies_and_roles_at_pinned_versions(world: World) -> None:
    """Two roles of the solver, one of the verifier."""
    roles = {"plan": "solver", "work": "solver", "check": "verifier"}
    await world.create_run(dataset="Counting", evaluation=EVERY_VERSION, policies=BOTH, roles=roles)
    solver = await world.trainer("solver")
    assert await evaluations(world) == []
    verifier, node = await world.trainer("verifier"), await world.node()
    node.serving = dict.fromkeys(BOTH, 0)
    await planned(world, 1)
    leases = [lease for lease in await node.lease(16) if lease.required_versions]
    assert [dict(lease.required_versions) for lease in leases] == [node.serving] * 3
    for number, lease in enumerate(leases):
        episode = node.episode(lease, 0, policies=())
        episode.metrics["team"] = float(number == 0)
        for role, policy_id in roles.items():
            name = f"{episode.episode_id}.{role}"
            reward = float(number) if role == "work" else 1.0
            item = make_trajectory(name, policy_id=policy_id, role=role, reward=reward)
            episode.trajectories.append(item)
        assert await node.outcome(episode) == "ACCEPTED"
    first, second = await evaluations(world)
    assert (first.policy_id, first.num_samples, first.complete) == ("solver", 3, True)
    assert [(role.role, role.num_samples, role.mean_reward) for role in first.roles] == [
        ("plan", 3, 1.0),
        ("work", 3, 1.0),
    ]
    assert (second.policy_id, second.mean_reward, first.evaluation_id) == (
        "verifier",
        1.0,
        second.evaluation_id,
    )
    assert first.metrics["team"] == second.metrics["team"] == 1 / 3
    assert (solver.policy_id, verifier.policy_id) == BOTH


async def test_nodes_get_no_newer_version_of_any_policy_while_a_pass_is_open(world: World) -> None:
    await world.create_run(dataset="Counting", evaluation=EVERY_VERSION, policies=BOTH, groups_per_step=1)
    trainers, node = {name: await world.trainer(name) for name in BOTH}, await world.node()
    node.serving = dict.fromkeys(BOTH, 0)
    await planned(world, 1)
    evaluating = [lease for lease in await node.lease(3) if lease.required_versions]
    (lease,) = await node.lease(1)
    await node.complete(lease, policies=BOTH)
    await trainers["solver"].train(1, base_version=0)
    context = await world.dataflow.registry.get(world.run_id)
    for_nodes = world.dataflow.versions.for_nodes
    assert await for_nodes(context, "solver", 0) == []
    assert [found.version for found in (await world.join("late", max_concurrent_tasks=4)).versions] == [0, 0]
    assert len(await evaluations(world)) == 2, "no second pass beside it"
    await node.complete_all(evaluating, policies=BOTH)
    await planned(world, 2)
    assert [found.version for found in await for_nodes(context, "solver", 0)] == [1]
    newest = (await evaluations(world))[-1]
    assert dict(newest.versions) == {"solver": 1, "verifier": 0}


THRICE = "{every_versions: 0, final_samples: 2, samples_per_task: 3}"
NO_STEPS = ("run.steps=0",)


async def evaluation(world: World, **fields: Any) -> evaluation_service_pb2.GetEvaluationResponse:
    """An evaluation in full, the newest unless `fields` name another."""
    return await world.ask(evaluation_service_pb2.GetEvaluationResponse, **fields)


async def test_a_held_out_task_has_several_samples_that_are_scored_together(world: World) -> None:
    _, node = await started(world, evaluation=THRICE)
    leases = [lease for lease in await node.lease(6) if lease.required_versions]
    prompts = [lease.task.messages[0].content for lease in leases]
    assert prompts == ["heldout-0"] * 3 + ["heldout-1"] * 3
    assert len({lease.seed for lease in leases}) == 6
    for lease, reward in zip(leases, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], strict=True):
        await node.complete(lease, reward=reward)
    found = await evaluation(world)
    (described,) = found.evaluations
    assert (described.num_samples, described.samples_per_task, described.complete) == (6, 3, True)
    (score,) = found.scores
    assert (score.num_tasks, score.num_samples, score.avg_at_k) == (2, 6, 0.5)
    # c = 1 and c = 2 of n = 3: 1 − C(2, 2) / C(3, 2) = 2 / 3, and 1.
    assert [(item.k, item.value) for item in score.pass_at_k] == [
        (1, 0.5),
        (2, pytest.approx(5 / 6)),
        (3, 1.0),
    ]
    assert [task.task_id for task in found.tasks] == ["heldout-0", "heldout-1"]
    assert [[item.reward for item in task.samples] for task in found.tasks] == [[1, 0, 0], [1, 1, 0]]


async def test_tasks_of_an_evaluation_come_page_by_page(world: World) -> None:
    _, node = await started(world)
    await evaluate(node)
    first = await evaluation(world, page_size=2)
    second = await evaluation(world, page_size=2, page_token=first.next_page_token)
    assert [task.index for task in [*first.tasks, *second.tasks]] == [0, 1, 2]
    assert second.next_page_token == ""
    assert first.scores == second.scores


async def test_an_evaluation_that_there_is_not_is_refused_with_those_there_are(world: World) -> None:
    await started(world)
    with pytest.raises(NotFoundError, match=r"no evaluation '9:final'; its newest are: 0:periodic"):
        await evaluation(world, evaluation_id="9:final")


async def test_a_data_set_that_ends_ends_the_evaluation_with_whole_tasks(world: World) -> None:
    _, node = await started(world, dataset="Short", evaluation="{final_samples: 5, samples_per_task: 2}")
    assert await evaluate(node) == 4
    (found,) = (await evaluation(world)).evaluations
    assert (found.num_planned, found.complete) == (4, True)


async def test_a_run_of_no_steps_is_its_final_evaluation_and_ends_by_itself(world: World) -> None:
    await world.create_run(dataset="Counting", evaluation=FIRST_ONLY, overrides=NO_STEPS)
    trainer, node = await world.trainer(publish_first=False), await world.node()
    assert await node.lease(4, wait_s=0) == []
    assert (await world.status()).state == run_pb2.RUN_STATE_ACTIVE
    await trainer.publish(version=0, step=0)
    node.serving = {"solver": 0}
    await until_finished(world, node)
    (found,) = await evaluations(world)
    assert (found.version, found.final, found.num_samples) == (0, True, 3)
    await world.has_account(ingested=3, evaluated=3)


async def test_journals_of_all_but_the_newest_evaluations_are_let_go(world: World) -> None:
    await started(world)
    run_id, store = world.run_id, world.dataflow.store.evaluations
    names = [f"0:{number:02}" for number in range(17)]
    for name in names:
        await store.plan(run_id, name, versions={"solver": 0}, planned=0, samples_per_task=1, final=True)
        await store.feed(run_id, name, expected_fed=0, planned=0, tasks=[], journal='[0, "t", ""]\n')
    kept = [bool(await store.journal(run_id, name)) for name in names]
    assert kept == [False, *[True] * 16]
