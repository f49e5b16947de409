"""Verdicts over complete tasks: whole groups, one reason each."""

import re
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.plugins import Filter, Group
from astraflow.recipe.groups import RouteConditions, RouteSettings
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules import groups
from astraflow_dataflow.rules.groups import judge, was_judged

rules = partial(groups.Rules, min_members=None)
NO_RULES = rules(filters=())


def header(trajectory_id: str, version: int = 0, **facts: Any) -> trajectory_pb2.TrajectoryHeader:
    """A header as it was pushed."""
    facts = {"policy_id": "p", "reward": 1.0, "min_version": version, "max_version": version} | facts
    return trajectory_pb2.TrajectoryHeader(trajectory_id=trajectory_id, **facts)


def complete(*headers: trajectory_pb2.TrajectoryHeader, spec: bytes = b"", **changes: Any) -> CompleteTask:
    """A complete task of two members."""
    facts = {"why": "", "credited": frozenset({"p"}), "group_size": 2, "num_finished": 2} | changes
    given = groups.groups_of("t", spec=spec, headers=headers)
    items = [groups.items_of("t", group) for group in given]
    return CompleteTask(task_id="t", groups=given, items=items, **facts)


ONE = header("a")


def test_a_good_group_is_ready_with_the_items_of_its_trajectories() -> None:
    task = complete(header("b", 3), header("a", 2, reward=0.5))
    (group,), (batch,) = task.groups, task.items
    assert judge(task, NO_RULES) == ["ready"]
    assert (group.group_id, group.policy, group.oldest_version, group.rewards) == ("t/p", "p", 2, [0.5, 1.0])
    assert [
        (item.trajectory_id, item.task_id, item.group_id, item.min_version, item.reward)
        for item in batch.items
    ] == [("a", "t", "t/p", 2, 0.5), ("b", "t", "t/p", 3, 1.0)]


def test_an_item_says_whether_a_limit_of_tokens_cut_its_answer_off() -> None:
    (batch,) = complete(header("a", finish_reason="length"), header("b", finish_reason="stop")).items
    assert [item.truncated for item in batch.items] == [True, False]


def test_groups_are_per_policy_and_role() -> None:
    headers = header("a", role="x"), header("b", role="y"), header("c", policy_id="q")
    task = complete(*headers, credited=frozenset({"x", "y", "q"}))
    assert [group.group_id for group in task.groups] == ["t/p/x", "t/p/y", "t/q"]
    assert judge(task, NO_RULES) == ["ready"] * 3


def test_items_say_which_episode_and_which_of_its_turns_they_are_of() -> None:
    """The server counts turns of each policy and role by itself, whatever a client wrote; ids mean nothing."""
    parts = [("e-9", "x"), ("e-10", "y"), ("e-11", "x"), ("e-2", ""), ("e-3", "p")]
    episode = trajectory_pb2.Episode(member=3)
    for trajectory_id, role in parts:
        given = trajectory_pb2.TrajectoryHeader(
            trajectory_id=trajectory_id, policy_id="p", role=role, turn=7, member=7
        )
        episode.trajectories.add(header=given)
    placed = list(groups.placed_headers(episode))
    items = complete(*placed).items
    turns = {
        item.trajectory_id: (item.role, item.member, item.turn) for batch in items for item in batch.items
    }
    wanted = {
        "e-9": ("x", 3, 0),
        "e-11": ("x", 3, 1),
        "e-10": ("y", 3, 0),
        "e-2": ("p", 3, 0),
        "e-3": ("p", 3, 1),
    }
    assert turns == wanted


def test_a_task_without_trajectories_has_no_groups() -> None:
    assert judge(complete(), NO_RULES) == []


def test_a_role_that_was_not_charged_ends_as_no_credit_without_being_judged() -> None:
    assert judge(complete(ONE, credited=frozenset({"q"})), NO_RULES) == ["no_credit"]
    assert not was_judged("no_credit")


def test_a_task_that_was_never_leased_counts_as_charged() -> None:
    assert judge(complete(ONE, credited=None), NO_RULES) == ["ready"]


@pytest.mark.parametrize(
    ("why", "finished", "min_members", "expected"),
    [
        ("", 4, None, ""),
        ("", 3, None, "incomplete"),
        ("", 3, 3, ""),
        ("", 2, 3, "incomplete"),
        ("dead_letter", 3, None, "incomplete"),
        ("dead_letter", 3, 2, ""),
        ("expired", 3, None, "expired"),
        ("expired", 3, 3, ""),
        ("expired", 0, 1, "expired"),
        ("run_finished", 4, 1, "run_finished"),
    ],
)
def test_incomplete_tasks_are_used_only_as_the_recipe_allows(
    why: str, finished: int, min_members: int | None, expected: str
) -> None:
    task = complete(why=why, num_finished=finished, group_size=4)
    assert groups.incomplete_reason(task, min_members=min_members) == expected


def test_filters_apply_in_order_and_the_first_refusal_decides() -> None:
    never = Mock()
    two = rules(filters=(("refuse", lambda group: False), ("never", never)))
    (verdict,) = judge(complete(ONE), two)
    assert (verdict, was_judged(verdict), never.called) == ("filtered", True, False)


def raises(group: Group) -> bool:
    """No answer."""
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (raises, r"ZeroDivisionError:  \(test_groups.py:\d+ in raises\)"),
        (lambda group: None, "it returned NoneType, not True or False"),
        (lambda group: "yes", "it returned str"),
    ],
)
def test_a_filter_that_fails_has_its_own_reason_and_moves_no_average(broken: Filter, problem: str) -> None:
    filtering = rules(filters=(("broken", broken),))
    (verdict,) = judge(complete(ONE), filtering)
    assert (verdict, was_judged(verdict)) == ("filter_failed", False)
    (fault,) = filtering.faults.all()
    assert (fault.kind, fault.name, fault.count) == ("filter", "broken", 1)
    assert re.search(problem, fault.problem), fault.problem


def test_a_slow_filter_is_heard_and_named() -> None:
    slow = rules(filters=(("slow", lambda group: True),), clock=iter([0.0, 0.2]).__next__)
    assert judge(complete(ONE), slow) == ["ready"]
    assert "it took 0.2 s, at most 0.1 s; make it faster" in slow.faults.all()[0].problem


def test_a_filter_sees_the_whole_group_and_its_task() -> None:
    spec = task_pb2.Task(task_id="t", source="gsm8k", data_json=b'{"gold": 3}').SerializeToString()
    facts = header("a", role="x", num_tokens=9, finish_reason="length", metrics={"turns": 2})
    see = Mock(return_value=True)
    judge(complete(facts, spec=spec, credited=frozenset({"x"})), rules(filters=(("see", see),)))
    (group,) = see.call_args.args
    assert (group.policy, group.role, group.group_id, group.verdict) == ("p", "x", "t/p/x", "")
    assert (group.task.source, dict(group.task.data)) == ("gsm8k", {"gold": 3})
    (only,) = group.trajectories
    assert (only.num_tokens, only.finish_reason, dict(only.metrics)) == (9, "length", {"turns": 2.0})


@given(st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from(["", "x"]), st.floats(0, 1)), max_size=24))
def test_every_trajectory_is_in_exactly_one_group(rows: list[tuple[str, str, float]]) -> None:
    headers = [header(f"t{n}", policy_id=p, role=r, reward=reward) for n, (p, r, reward) in enumerate(rows)]
    listed = sorted(item.trajectory_id for batch in complete(*headers).items for item in batch.items)
    assert listed == sorted(given.trajectory_id for given in headers)


def test_a_filter_that_changes_what_it_sees_changes_no_item() -> None:
    def spoil(group: Group) -> bool:
        group.trajectories[0].reward = 9.0  # type: ignore[misc]
        return True

    task = complete(ONE)
    judge(task, rules(filters=(("spoil", spoil),)))
    assert task.items[0].items[0].reward == 1.0


def test_filters_do_not_see_what_a_route_took_and_the_acceptance_counts_it() -> None:
    asked: list[str] = []
    routed = RouteSettings(name="solved", when=RouteConditions(min_reward=1), to="drop")
    judged = rules(filters=(("seen", lambda group: asked.append(group.group_id) or True),), routes=(routed,))
    assert judge(complete(ONE), judged) == ["routed_solved"]
    assert judge(complete(header("a", reward=0.5)), judged) == ["ready"]
    assert asked == ["t/p"]
    assert was_judged("routed_solved")
    # Not a whole group, or one without credit: nobody routes it.
    assert judge(complete(ONE, num_finished=1), judged) == ["incomplete"]
    assert judge(complete(ONE, credited=frozenset()), judged) == ["no_credit"]
