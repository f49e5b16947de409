"""Which versions are evaluated, and when one is given up."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from astraflow.recipe import EvaluationSettings
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.tasks import task_problem
from support.dataflow_snapshots import EVALUATION

SETTINGS = EvaluationSettings(every_versions=10, num_samples=256, final_samples=1024)


@pytest.mark.parametrize(
    ("version", "samples"), [(0, 1024), (1, None), (9, None), (10, 256), (20, 256), (21, None)]
)
def test_version_zero_and_every_nth_are_evaluated(version: int, samples: int | None) -> None:
    plan = evaluation.plan_version("p", version, settings=SETTINGS)
    assert (None if plan is None else plan.planned) == samples


def test_zero_means_the_first_and_the_final_version_only() -> None:
    settings = EvaluationSettings(every_versions=0)
    assert [v for v in range(30) if evaluation.plan_version("p", v, settings=settings)] == [0]
    assert evaluation.plan_final("p", 29, settings=settings).final


def test_a_final_evaluation_of_a_version_already_evaluated_is_another_one() -> None:
    periodic = evaluation.plan_version("p", 10, settings=SETTINGS)
    assert periodic is not None
    assert periodic.evaluation_id != evaluation.plan_final("p", 10, settings=SETTINGS).evaluation_id


def test_a_task_id_says_what_it_demands() -> None:
    plan = evaluation.plan_final("my-policy_2", 123, settings=SETTINGS)
    task_id = evaluation.task_id(plan.evaluation_id, 7)
    assert evaluation.demand_of(task_id) == evaluation.Demand(policy_id="my-policy_2", version=123)
    assert task_problem(task_pb2.Task(task_id=task_id), allow_evaluation=True) is None


@pytest.mark.parametrize("task_id", ["train-1", "eval:", "eval:p:x:final:0", "eval:p:1:final", ""])
def test_other_ids_demand_nothing(task_id: str) -> None:
    assert evaluation.demand_of(task_id) is None


stored = partial(replace, EVALUATION, version=10)


@pytest.mark.parametrize(
    ("facts", "newest", "idle_s", "expected"),
    [
        ({}, 10, 1e9, False),
        ({}, 11, 5.0, False),
        ({}, 11, 10.0, True),
        ({"state": "complete"}, 11, 1e9, False),
        ({"final": True}, 10, 1e9, False),
        ({"final": True}, 11, 0.0, True),
        ({}, None, 1e9, False),
    ],
)
def test_only_superseded_ones_are_given_up(facts: Any, newest: Any, idle_s: float, expected: bool) -> None:
    given_up = evaluation.must_give_up(stored(**facts), newest_version=newest, idle_s=idle_s, patience_s=10.0)
    assert given_up is expected


def test_a_run_ends_when_each_newest_version_has_its_final_evaluation() -> None:
    final = stored(final=True, state="complete")
    done = [final, replace(final, policy_id="q", version=3)]
    assert evaluation.finals_complete(done, newest={"p": 10, "q": 3})
    assert not evaluation.finals_complete(done, newest={"p": 11, "q": 3})
    assert not evaluation.finals_complete([stored(state="complete")], newest={"p": 10})
    assert evaluation.finals_complete([], newest={})
