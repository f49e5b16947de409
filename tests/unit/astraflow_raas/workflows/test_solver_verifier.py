"""A solver answers and a verifier judges: who is asked what, what each earns, and what is left out."""

import asyncio
from typing import Any

import pytest

from astraflow.plugins import Episode, Message, PolicyUnavailable, TaskSpec
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.workflows.solver_verifier import SolverVerifier
from support.agents import ScriptedPolicy

TASK = TaskSpec("t", (Message("system", "Be brief."), Message("user", r"\frac{6}{2}?")), {"answer": "3"})
RIGHT, WRONG = "3", "4"
TEMPLATE = {"verifier_prompt": "{problem} | {answer}"}


def says(role: str, *texts: str, wanted: bool = True) -> ScriptedPolicy:
    script = list(texts)
    return ScriptedPolicy(lambda _: script.pop(0), name=role, role=role, wants_trajectory=wanted)


def play(solver: ScriptedPolicy, verifier: ScriptedPolicy, **settings: Any) -> Episode:
    def reward(task: TaskSpec, completion: str) -> float:
        return float(completion.endswith(task.data["answer"]))

    workflow = SolverVerifier(reward=RewardScorer(reward), **settings)
    return asyncio.run(workflow.run(TASK, {"solver": solver, "verifier": verifier}))


def earned(episode: Episode) -> list[tuple[str, float]]:
    return [(trajectory.role, trajectory.reward) for trajectory in episode.trajectories]


def test_a_rejected_solver_tries_again_and_all_answers_are_one_role_of_the_episode() -> None:
    solver, verifier = says("solver", WRONG, RIGHT), says("verifier", "4 is wrong: REJECT")
    episode = play(solver, verifier)
    assert earned(episode) == [("solver", 0.0), ("verifier", 1.0), ("solver", 1.0)]
    assert episode.metrics == {
        "team": 1.0,
        "first": 0.0,
        "retry": 1.0,
        "approve": 0.0,
        "unparsable": 0.0,
        "wrong_rejected": 1.0,
    }


@pytest.mark.parametrize(
    ("answer", "verdict", "reward"),
    [
        (RIGHT, "approve", 1.0),
        (RIGHT, "I would not reject it. Approve.", 1.0),
        (WRONG, "REJECT", 2.0),
        (WRONG, "approve", 0.0),
        (RIGHT, "approve? no: reject", 0.0),
        (RIGHT, "", 0.0),
        (WRONG, "approved, not rejected", 0.0),
    ],
)
def test_a_verdict_is_the_last_of_the_two_words_and_earns_by_being_right(
    answer: str, verdict: str, reward: float
) -> None:
    episode = play(says("solver", answer), says("verifier", verdict), max_retries=0, rejection_reward=2.0)
    assert earned(episode)[1] == ("verifier", reward)


def test_a_verdict_that_says_neither_counts_as_approval() -> None:
    episode = play(says("solver", WRONG), says("verifier", "hm"), max_retries=3)
    assert earned(episode) == [("solver", 0.0), ("verifier", 0.0)]
    assert (episode.metrics["approve"], episode.metrics["unparsable"]) == (1.0, 1.0)


def test_answers_are_bounded_and_the_last_one_is_not_judged() -> None:
    episode = play(says("solver", *[WRONG] * 3), says("verifier", *["reject"] * 2), max_retries=2)
    assert [role for role, _ in earned(episode)] == ["solver", "verifier", "solver", "verifier", "solver"]
    assert (episode.metrics["team"], episode.metrics["retry"]) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("retry", "prompt"),
    [
        ("fresh", r"<system>Be brief.¶<user>\frac{6}{2}?¶"),
        ("feedback", r"<system>Be brief.¶<user>\frac{6}{2}?¶<assistant>4¶<user>No: reject {answer}¶"),
    ],
)
def test_a_retry_sees_the_verdict_or_the_problem_alone(retry: str, prompt: str) -> None:
    solver = says("solver", WRONG, RIGHT)
    play(solver, says("verifier", "reject {answer}"), retry=retry, retry_prompt="No: {verdict}")
    assert solver.prompts[1].removesuffix("<assistant>") == prompt


@pytest.mark.parametrize(
    ("answer_shown", "shown"),
    [("", r"5 no \boxed{3} 3"), (r"\\boxed\{(\d)\}", "3"), (r"\d no", "5 no"), ("none", r"5 no \boxed{3} 3")],
)
def test_the_verifier_sees_the_problem_and_what_is_shown_of_the_answer(answer_shown: str, shown: str) -> None:
    verifier = says("verifier", "approve")
    play(says("solver", r"5 no \boxed{3} 3"), verifier, answer_shown=answer_shown, **TEMPLATE)
    assert verifier.prompts == [rf"<user>\frac{{6}}{{2}}? | {shown}¶<assistant>"]


def test_a_role_without_room_is_asked_only_where_the_others_need_it() -> None:
    solver, verifier = says("solver", WRONG, RIGHT), says("verifier", "reject", wanted=False)
    assert earned(play(solver, verifier)) == [("solver", 0.0), ("solver", 1.0)]
    unneeded = says("verifier", wanted=False)
    assert earned(play(says("solver", RIGHT), unneeded, max_retries=0)) == [("solver", 1.0)]
    assert unneeded.prompts == []
    asked = says("solver", RIGHT, wanted=False)
    assert earned(play(asked, says("verifier", "approve"))) == [("verifier", 1.0)]


def test_without_a_verifier_the_answers_so_far_are_kept_and_say_nothing_of_the_team() -> None:
    away = says("verifier")
    away.fault = PolicyUnavailable("its engine is down")
    episode = play(says("solver", RIGHT), away)
    assert (earned(episode), episode.metrics) == ([("solver", 1.0)], {})
    with pytest.raises(PolicyUnavailable):
        play(says("solver", RIGHT, wanted=False), away)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_retries": 32}, "max_retries is 32; give 0 to 31"),
        ({"rejection_reward": 0.0}, r"rejection_reward is 0\.0; give more than 0"),
        ({"approve": "OK", "reject": "ok"}, "'OK' and reject 'ok' must be two different words"),
        ({"verifier_prompt": "{problem}"}, r"verifier_prompt has no \{answer\}, got '\{problem\}'; add it"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_the_node_starts(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SolverVerifier(reward=RewardScorer(lambda task, completion: 0.0), **settings)
