"""A planner and its workers, two roles of one policy: a plan earns what its answers earn."""

import asyncio

import pytest

from astraflow.plugins import Episode, Message, TaskSpec
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.workflows.planner_worker import PlannerWorker
from support.agents import ScriptedPolicy

TASK = TaskSpec("t", (Message("user", "3 + 4?"),), {"answer": "7"})


def play(planner: ScriptedPolicy, worker: ScriptedPolicy, *, answers: int = 1) -> Episode:
    workflow = PlannerWorker(
        reward=RewardScorer(lambda task, completion: float(completion == task.data["answer"])),
        answers=answers,
        planner_prompt="plan {problem}",
        worker_prompt="{problem} by {plan}",
    )
    return asyncio.run(workflow.run(TASK, {"planner": planner, "worker": worker}))


def role(name: str, *texts: str, wanted: bool = True) -> ScriptedPolicy:
    script = list(texts)
    return ScriptedPolicy(lambda _: script.pop(0), role=name, wants_trajectory=wanted)


def test_a_plan_earns_the_mean_of_the_answers_that_followed_it() -> None:
    planner, worker = role("planner", "count {up}"), role("worker", "7", "8")
    episode = play(planner, worker, answers=2)
    earned = [(item.policy, item.role, item.reward) for item in episode.trajectories]
    assert earned == [("solver", "planner", 0.5), ("solver", "worker", 1.0), ("solver", "worker", 0.0)]
    assert episode.metrics == {"team": 0.5, "plan_tokens": len("count {up}¶")}
    assert planner.prompts == ["<user>plan 3 + 4?¶<assistant>"]
    assert worker.prompts == ["<user>3 + 4? by count {up}¶<assistant>"] * 2


@pytest.mark.parametrize("wanted", ["planner", "worker"])
def test_both_roles_are_asked_and_what_is_not_wanted_is_left_out(wanted: str) -> None:
    planner = role("planner", "add", wanted=wanted == "planner")
    worker = role("worker", "7", wanted=wanted == "worker")
    assert [item.role for item in play(planner, worker).trajectories] == [wanted]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answers": 0}, "answers is 0; give 1 to 63"),
        ({"worker_prompt": "go"}, r"worker_prompt has no \{plan\}"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_the_node_starts(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PlannerWorker(reward=RewardScorer(lambda task, completion: 0.0), **settings)  # type: ignore[arg-type]
