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


stored = partial(replace, EVALUATION, versions={"p": 10, "q": 3})
BOTH = ("p", "q")


@pytest.mark.parametrize(
    ("newest", "samples"),
    [
        ({"p": 10, "q": 3}, None),
        ({"p": 19, "q": 9}, None),
        ({"p": 20, "q": 3}, 256),
        ({"p": 14, "q": 10}, 256),
        ({"p": 33, "q": 12}, 256),
    ],
)
def test_a_pass_is_due_at_the_newest_versions_once_any_policy_has_made_its_steps(
    newest: dict[str, int], samples: int | None
) -> None:
    plan = evaluation.plan_periodic(newest, [stored()], settings=SETTINGS)
    assert (plan and plan.planned) == samples
    assert plan is None or plan.versions == newest


def test_zero_means_the_first_and_the_final_pass_only() -> None:
    settings = EvaluationSettings(every_versions=0, num_samples=1, final_samples=2)
    first = evaluation.plan_periodic({"p": 0}, [], settings=settings)
    assert first is not None
    assert (first.planned, first.final) == (2, False)
    assert evaluation.plan_periodic({"p": 900, "q": 900}, [stored()], settings=settings) is None
    assert evaluation.plan_final({"p": 900}, settings=settings).final


def test_a_pass_has_so_many_samples_of_each_held_out_task() -> None:
    settings = EvaluationSettings(num_samples=256, final_samples=100, samples_per_task=4)
    plan = evaluation.plan_final({"p": 7}, settings=settings)
    assert (plan.planned, plan.samples_per_task) == (400, 4)
    assert evaluation.sample_index(evaluation.task_id(plan.evaluation_id, 399)) == 399


def test_a_final_pass_at_versions_already_evaluated_is_another_one() -> None:
    periodic = evaluation.Plan(versions={"p": 10}, planned=1, final=False)
    assert periodic.evaluation_id != evaluation.plan_final({"p": 10}, settings=SETTINGS).evaluation_id


def test_a_task_id_says_what_it_demands_of_each_policy() -> None:
    plan = evaluation.plan_final({"p": 123, "q": 4}, settings=SETTINGS)
    task_id = evaluation.task_id(plan.evaluation_id, 7)
    assert evaluation.demand_of(task_id, BOTH) == {"p": 123, "q": 4}
    assert task_problem(task_pb2.Task(task_id=task_id), allow_evaluation=True) is None


@pytest.mark.parametrize(
    "task_id", ["train-1", "eval:", "eval:x.1:final:0", "eval:1:final:0", "eval:1.2:final", ""]
)
def test_other_ids_demand_nothing(task_id: str) -> None:
    assert evaluation.demand_of(task_id, BOTH) == {}


@pytest.mark.parametrize(
    ("facts", "newest", "idle_s", "held_s", "expected"),
    [
        ({}, {"p": 10, "q": 3}, 1e9, 1e9, False),
        ({}, {"p": 10, "q": 4}, 5.0, 5.0, False),
        ({}, {"p": 10, "q": 4}, 10.0, 10.0, True),
        ({}, {"p": 11, "q": 3}, 1.0, 40.0, True),
        ({"state": "complete"}, {"p": 11, "q": 3}, 1e9, 1e9, False),
        ({"final": True}, {"p": 10, "q": 3}, 1e9, 1e9, False),
        ({"final": True}, {"p": 10, "q": 4}, 0.0, 0.0, True),
        ({}, {}, 1e9, 1e9, False),
    ],
)
def test_only_those_that_newer_versions_wait_for_are_given_up(
    facts: Any, newest: Any, idle_s: float, held_s: float, expected: bool
) -> None:
    waited = {"idle_s": idle_s, "held_s": held_s, "patience_s": 10.0}
    assert evaluation.must_give_up(stored(**facts), newest=newest, **waited) is expected


def test_what_was_given_up_counts_from_a_quarter_of_its_samples_on() -> None:
    assert [stored(state="given_up", done=done).is_scarce for done in (0, 1)] == [True, False]
    assert not stored(state="open").is_scarce


def test_a_run_ends_when_the_newest_versions_have_their_final_pass() -> None:
    final = stored(final=True, state="complete")
    assert evaluation.finals_complete([final], newest={"p": 10, "q": 3})
    assert not evaluation.finals_complete([final], newest={"p": 11, "q": 3})
    assert not evaluation.finals_complete([stored(state="complete")], newest={"p": 10, "q": 3})


ASKED = {"requested": True, "state": "waiting", "final": False}
PERIODIC = stored(state="complete")
FIRST = stored(**ASKED, evaluation_id="first", versions={})
NAMED = stored(**ASKED, evaluation_id="named", versions={"p": 9})
DONE = replace(FIRST, state="complete", versions={"p": 10, "q": 3})


@pytest.mark.parametrize(
    ("passes", "is_due", "chosen"),
    [
        ([], False, None),
        ([PERIODIC], True, None),
        ([PERIODIC, FIRST], False, "first"),
        ([PERIODIC, FIRST], True, "first"),
        ([FIRST], True, None),
        ([DONE, FIRST], True, None),
        ([DONE, FIRST], False, "first"),
        ([DONE, FIRST, NAMED], True, "named"),
        ([DONE, replace(NAMED, versions={"p": 10}), FIRST], True, None),
    ],
)
def test_requests_and_the_recipe_take_turns_but_for_one_whose_version_is_overtaken(
    passes: list[Any], is_due: bool, chosen: str | None
) -> None:
    found = evaluation.next_request({"p": 10, "q": 3}, passes, is_periodic_due=is_due)
    assert (found and found.evaluation_id) == chosen
    due = evaluation.plan_periodic({"p": 20, "q": 3}, [PERIODIC, *passes], settings=SETTINGS)
    assert due is not None, "requests do not count as passes of the recipe"


def test_tasks_of_a_request_say_which_versions_they_demand() -> None:
    identifier = evaluation.task_id(replace(DONE, evaluation_id="mine-7").task_stem, 4)
    assert identifier == "eval:10.3:mine-7:4"
    assert evaluation.demand_of(identifier, BOTH) == {"p": 10, "q": 3}
