"""Verdicts over complete tasks: whole groups, one reason each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.v1 import batch_pb2
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.plugins.drop_zero_advantage import DropZeroAdvantage
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.groups import Rules, incomplete_reason, judge

NO_RULES = Rules(min_members=None, filters=())


def header(
    trajectory_id: str, *, policy: str = "p", role: str = "", reward: float = 1.0, version: int = 0
) -> bytes:
    """A serialized header."""
    return trajectory_pb2.TrajectoryHeader(
        trajectory_id=trajectory_id,
        policy_id=policy,
        role=role,
        reward=reward,
        min_version=version,
        max_version=version,
    ).SerializeToString()


def complete(
    headers: Sequence[tuple[str, bytes]],
    *,
    why: str = "",
    credited: frozenset[str] | None = frozenset({"p"}),
    finished: int | None = None,
    group_size: int = 2,
) -> CompleteTask:
    """A complete task."""
    return CompleteTask(
        task_id="t",
        why=why,
        credited=credited,
        group_size=group_size,
        num_finished=group_size if finished is None else finished,
        headers=dict(headers),
    )


def test_a_good_group_is_ready_with_its_oldest_version_and_its_items() -> None:
    (verdict,) = judge(
        complete([("b", header("b", version=3)), ("a", header("a", version=2, reward=0.5))]), NO_RULES
    )
    assert (verdict.group_id, verdict.policy_id, verdict.verdict) == ("t/p", "p", "ready")
    assert (verdict.oldest_version, verdict.reward_sum, verdict.trajectory_ids) == (2, 1.5, ("a", "b"))
    items = batch_pb2.Batch.FromString(verdict.items).items
    assert [(item.trajectory_id, item.task_id, item.group_id, item.min_version) for item in items] == [
        ("a", "t", "t/p", 2),
        ("b", "t", "t/p", 3),
    ]


def test_groups_are_per_policy_and_role() -> None:
    headers = [("a", header("a", role="x")), ("b", header("b", role="y")), ("c", header("c", policy="q"))]
    verdicts = judge(complete(headers, credited=frozenset({"p", "q"})), NO_RULES)
    assert [verdict.group_id for verdict in verdicts] == ["t/p/x", "t/p/y", "t/q"]


def test_a_task_without_trajectories_has_no_groups() -> None:
    assert judge(complete([]), NO_RULES) == []


def test_a_policy_that_was_not_charged_ends_as_no_credit_without_being_judged() -> None:
    (verdict,) = judge(complete([("a", header("a"))], credited=frozenset({"q"})), NO_RULES)
    assert (verdict.verdict, verdict.judged) == ("no_credit", False)


def test_a_task_that_was_never_leased_counts_as_charged() -> None:
    (verdict,) = judge(complete([("a", header("a"))], credited=None), NO_RULES)
    assert verdict.verdict == "ready"


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
    task = complete([], why=why, finished=finished, group_size=4)
    assert incomplete_reason(task, min_members=min_members) == expected


def test_filters_apply_in_order_and_the_first_refusal_decides() -> None:
    asked: list[str] = []

    def refuse(rewards: Sequence[float]) -> bool:
        asked.append("refuse")
        return False

    def never(rewards: Sequence[float]) -> bool:
        asked.append("never")
        return True

    rules = Rules(min_members=None, filters=(("refuse", refuse), ("never", never)))
    (verdict,) = judge(complete([("a", header("a"))]), rules)
    assert (verdict.verdict, verdict.judged, asked) == ("filtered", True, ["refuse"])


def test_a_filter_that_raises_drops_the_group_under_its_own_reason_and_moves_no_average() -> None:
    def broken(rewards: Sequence[float]) -> bool:
        raise ZeroDivisionError

    (verdict,) = judge(complete([("a", header("a"))]), Rules(min_members=None, filters=(("broken", broken),)))
    assert (verdict.verdict, verdict.judged) == ("filter_failed", False)


@given(st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from(["", "x"]), st.floats(0, 1)), max_size=24))
def test_every_trajectory_is_in_exactly_one_group(rows: list[tuple[str, str, float]]) -> None:
    headers = [
        (f"t{n}", header(f"t{n}", policy=p, role=r, reward=reward)) for n, (p, r, reward) in enumerate(rows)
    ]
    rules = Rules(min_members=None, filters=(("zero", DropZeroAdvantage()),))
    verdicts = judge(complete(headers), rules)
    listed = sorted(name for verdict in verdicts for name in verdict.trajectory_ids)
    assert listed == sorted(name for name, _ in headers)
