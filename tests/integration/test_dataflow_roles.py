"""Roles at the server: each trained role of a task is charged a group, leases name the roles without credit, and
charges are what the open tasks account for."""

import random
from collections.abc import Collection, Mapping

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.rollout.v1 import task_pb2
from support.dataflow_world import Node, World, make_trajectory, until

pytestmark = pytest.mark.integration
BOTH = ("solver", "verifier")
SAME = {"solver": "solver", "verifier": "verifier"}
FROZEN = ["policies.judge.train=false"]
TWO_ROLES = {"planner": "solver", "worker": "solver"}


async def policy(world: World, name: str = "solver") -> pb.PolicyStatus:
    (found,) = [item for item in (await world.status()).policies if item.policy_id == name]
    assert found.credit_error == 0
    return found


async def play(
    node: Node,
    lease: task_pb2.Lease,
    roles: Mapping[str, str],
    *,
    leave: Collection[str] = (),
    versions: Mapping[str, int] | None = None,
) -> None:
    """Complete a lease as a workflow that has these roles and leaves some out, at these versions of the policies."""
    for member in lease.members:
        episode = node.episode(lease, member, policies=())
        for role, policy_id in roles.items():
            if role not in leave:
                version = (versions or {}).get(policy_id, 0)
                name = f"{episode.episode_id}.{role}"
                item = make_trajectory(name, policy_id=policy_id, role=role, version=version, reward=member)
                episode.trajectories.append(item)
        assert await node.outcome(episode) == "ACCEPTED"


async def test_a_task_is_charged_a_group_for_each_role_of_a_policy(world: World) -> None:
    await world.create_run(dataset="Unevaluated", roles=TWO_ROLES, groups_per_step=3, max_staleness=0)
    await world.trainer()
    node = await world.node()
    leases = await node.lease(8)
    assert [len(lease.uncredited_roles) for lease in leases] == [0, 1], "three groups of room, two roles"
    assert (await policy(world)).outstanding_groups == 3
    for lease in leases:
        await play(node, lease, TWO_ROLES, leave=lease.uncredited_roles)
    await world.until(lambda status: status.policies[0].ready_groups == 3)
    assert (await policy(world)).outstanding_groups == 0
    await world.has_account(dropped={}, ready=6)


async def test_of_two_roles_neither_always_gets_the_last_group(world: World) -> None:
    await world.create_run(dataset="Unevaluated", roles=TWO_ROLES, groups_per_step=1, max_staleness=0)
    trainer, node, seen = await world.trainer(), await world.node(), []
    for step in range(1, 5):
        (lease,) = await node.lease(1)
        seen += lease.uncredited_roles
        await play(node, lease, TWO_ROLES, leave=lease.uncredited_roles, versions={"solver": step - 1})
        await trainer.train(step, base_version=step - 1)
    assert sorted(seen) == ["planner", "planner", "worker", "worker"]


async def test_under_all_a_task_waits_until_every_role_has_credit(world: World) -> None:
    await world.create_run(
        dataset="Unevaluated", policies=BOTH, admit="all", groups_per_step=1, max_staleness=0
    )
    solver, verifier, node = (
        await world.trainer("solver"),
        await world.trainer("verifier"),
        await world.node(),
    )
    (lease,) = await node.lease(4)
    await play(node, lease, SAME)
    await solver.train(1, base_version=0)
    assert (await policy(world)).credit == 1
    assert (await node.lease_reply()).waiting_for == "staleness_window"
    await verifier.release()
    (lease,) = await node.lease(4)
    assert list(lease.uncredited_roles) == ["verifier"], "a trainer that has ended is not waited for"


async def test_what_a_role_was_charged_is_released_whatever_becomes_of_its_task(world: World) -> None:
    await world.create_run(
        dataset="Unevaluated", policies=BOTH, max_attempts=1, group_deadline_s=2, groups_per_step=8
    )
    trainers, node = [await world.trainer(name) for name in BOTH], await world.node()
    assert len(trainers) == 2
    skipped, dead, late = await node.lease(3)
    await play(node, skipped, SAME, leave={"verifier"})
    await node.fail(dead, "workflow_error", retryable=False)
    await world.until(lambda status: all(item.outstanding_groups == 0 for item in status.policies))
    assert (await policy(world, "solver")).ready_groups == 1
    assert (await policy(world, "verifier")).ready_groups == 0, "a role that was skipped is not missing"
    await world.has_account(dropped={}, ready=2)
    assert late.task.task_id


async def test_a_task_leased_again_keeps_the_credit_it_was_given(world: World) -> None:
    await world.create_run(dataset="Unevaluated", policies=BOTH, groups_per_step=1, max_staleness=0)
    solver, _, node = await world.trainer("solver"), await world.trainer("verifier"), await world.node()
    (lease,) = await node.lease()
    await play(node, lease, SAME)
    await solver.train(1, base_version=0)
    (lease,) = await node.lease()
    assert list(lease.uncredited_roles) == ["verifier"]
    await node.fail(lease, "workflow_error")

    async def leased_again() -> bool:
        again = await node.lease(wait_s=1)
        return [(item.attempt, list(item.uncredited_roles)) for item in again] == [(2, ["verifier"])]

    await until(leased_again)
    assert [(await policy(world, name)).outstanding_groups for name in BOTH] == [1, 0]


async def test_charges_fit_the_window_and_are_what_open_tasks_account_for_after_any_sequence(
    world: World,
) -> None:
    roles = {"plan": "solver", "work": "solver", "check": "verifier"}
    await world.create_run(
        dataset="Unevaluated", policies=BOTH, roles=roles, groups_per_step=3, max_attempts=2
    )
    trainers = {name: await world.trainer(name) for name in BOTH}
    node, rng, held, steps = await world.node(), random.Random(3), [], dict.fromkeys(BOTH, 0)
    while sum(steps.values()) < 5:
        held += await node.lease(rng.randrange(1, 4), wait_s=0.05)
        rng.shuffle(held)
        for lease in [held.pop() for _ in range(min(len(held), rng.randrange(3)))]:
            if rng.random() < 0.3:
                await node.fail(lease, "workflow_error", retryable=rng.random() < 0.5)
            else:
                await play(node, lease, roles, leave=lease.uncredited_roles, versions=steps)
        name = rng.choice(BOTH)
        found = await policy(world, name)
        used = found.outstanding_groups + found.ready_groups + found.unpublished_groups
        assert found.credit == 6 - used, "acceptance is 1: what is not used is free"
        if found.ready_groups >= 3:
            steps[name] += 1
            await trainers[name].train(steps[name], base_version=steps[name] - 1)
    status = await world.status()
    assert status.trajectories.dropped["no_credit"] == 0
    assert status.trajectories.conservation_error == 0


async def test_a_node_without_an_engine_of_a_policy_gets_the_roles_of_the_others(world: World) -> None:
    await world.create_run(dataset="Unevaluated", policies=BOTH, groups_per_step=2, max_staleness=0)
    _, _, node = await world.trainer("solver"), await world.trainer("verifier"), await world.node()
    node.serving = {"solver": 0}
    leases = await node.lease(4)
    assert [list(lease.uncredited_roles) for lease in leases] == [["verifier"]] * 2
    assert [(await policy(world, name)).outstanding_groups for name in BOTH] == [2, 0]
    assert (await node.lease_reply()).waiting_for == "policy_not_served"
    (wait,) = [wait for wait in (await world.status()).waits if wait.reason == "policy_not_served"]
    assert (wait.stage, wait.policy_id) == ("lease", "verifier")


async def test_under_all_a_node_without_an_engine_of_a_policy_gets_nothing(world: World) -> None:
    await world.create_run(dataset="Unevaluated", policies=BOTH, admit="all")
    _, _, node = await world.trainer("solver"), await world.trainer("verifier"), await world.node()
    node.serving = {"solver": 0}
    assert (await node.lease_reply()).waiting_for == "policy_not_served"


async def test_a_task_given_back_for_a_lost_engine_costs_nothing_and_goes_on_without_that_policy(
    world: World,
) -> None:
    await world.create_run(
        dataset="Unevaluated", policies=BOTH, groups_per_step=1, max_staleness=0, max_attempts=1
    )
    _, _, node = await world.trainer("solver"), await world.trainer("verifier"), await world.node()
    (lease,) = await node.lease()
    assert await node.fail(lease, "engine_down"), "it is leased again though it had one attempt"
    node.serving = {"solver": 0}
    (again,) = await node.lease(wait_s=20)
    assert (again.task.task_id, list(again.uncredited_roles)) == (lease.task.task_id, ["verifier"])
    assert [(await policy(world, name)).outstanding_groups for name in BOTH] == [1, 1]
    await play(node, again, SAME, leave=again.uncredited_roles)
    await world.until(lambda status: all(item.outstanding_groups == 0 for item in status.policies))
    await world.has_account(dropped={}, ready=2)


async def test_a_task_given_back_for_a_lost_engine_goes_first_to_a_node_that_has_all(world: World) -> None:
    await world.create_run(dataset="Unevaluated", policies=BOTH, groups_per_step=1, max_staleness=0)
    _, _, node = await world.trainer("solver"), await world.trainer("verifier"), await world.node()
    whole = await world.node("whole")
    (lease,) = await node.lease()
    await node.fail(lease, "engine_down")
    node.serving, whole.serving = {"solver": 0}, dict.fromkeys(BOTH, 0)
    assert await node.lease(wait_s=0) == []
    (again,) = await whole.lease(wait_s=20)
    assert (again.task.task_id, list(again.uncredited_roles)) == (lease.task.task_id, [])


async def test_a_node_that_lags_in_one_policy_goes_on_with_the_other(world: World) -> None:
    await world.create_run(dataset="Unevaluated", policies=BOTH, groups_per_step=1, max_staleness=0)
    solver, _, node = await world.trainer("solver"), await world.trainer("verifier"), await world.node()
    (lease,) = await node.lease()
    await play(node, lease, SAME, leave={"verifier"})
    await solver.train(1, base_version=0)
    node.serving = {"solver": 0, "verifier": 0}
    (lease,) = await node.lease(4)
    assert list(lease.uncredited_roles) == ["solver"]
    assert (await node.lease_reply()).waiting_for == "node_behind"
    (wait,) = [wait for wait in (await world.status()).waits if wait.reason == "node_behind"]
    assert (wait.policy_id, wait.detail.partition(";")[0]) == ("solver", "n1 serves 0")


async def test_a_policy_that_is_not_trained_needs_a_version_and_nothing_else(world: World) -> None:
    await world.create_run(dataset="Unevaluated", policies=("solver", "judge"), overrides=FROZEN)
    await world.trainer("solver")
    node = await world.node()
    assert (await node.lease_reply()).waiting_for == "no_version"
    await world.trainer("judge")
    training = await node.lease(3)
    assert [list(lease.uncredited_roles) for lease in training] == [[]] * len(training)
    judge, solver = await policy(world, "judge"), await policy(world, "solver")
    assert (judge.frozen, judge.credit, judge.outstanding_groups) == (True, 0, 0)
    assert (solver.frozen, solver.outstanding_groups) == (False, len(training))
    pushed = node.episode(training[0], 0, policies=("solver", "judge"))
    assert (await node.push(pushed)).reason == "unknown_role"
    assert {item.policy_id for item in (await world.status()).evaluations} == {"solver"}


async def test_a_run_ends_without_waiting_for_a_policy_that_is_not_trained(world: World) -> None:
    await world.create_run(policies=("solver", "judge"), overrides=FROZEN)
    await world.trainer("judge")
    assert "no_trainer" in await world.waits()
    assert {wait.policy_id for wait in (await world.status()).waits if wait.stage == "batch"} == {"solver"}
    await world.finish()
    await until(world.is_finished)
