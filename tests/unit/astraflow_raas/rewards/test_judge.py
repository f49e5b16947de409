"""A judge that answers, hesitates, refuses, rambles and hangs: each has a name, and the recipe's rule decides."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from astraflow.plugins import (
    GenerateResult,
    Message,
    MissingCapability,
    PolicyUnavailable,
    RewardFailed,
    TaskSpec,
    VersionSpan,
)
from astraflow_raas.rewards.judge import Judge

TASK = TaskSpec("t1", (Message("user", "What is 3 + 4?"),), {"answer": "7"})
PROMPT = "Q: {task}\nA: {completion}\nGold: {answer}\nEnd with `Score: N`, N from 0 to 10."


class Judging:
    """Says the `answers` in turn, the last one for ever; an exception is raised, an event is awaited."""

    name = "critic"

    def __init__(self, *answers: object, version: int = 0) -> None:
        self.answers, self.version = list(answers), version
        self.questions: list[str] = []

    async def chat(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> GenerateResult:
        self.questions.append(messages[0].content)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        text, reason = answer if isinstance(answer, tuple) else (str(answer), "stop")
        return GenerateResult((1, 2), (-1.0, -1.0), (VersionSpan(0, 2, self.version),), text, reason)


async def graded(judging: Judging, completion: str = "7", judge: Judge | None = None, **settings: Any) -> Any:
    made = judge or Judge(**{"prompt": PROMPT, "scale": 10.0, "timeout_s": 5.0, **settings})
    return await made(TASK, completion, policies={"judge": judging})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("answer", "settings", "reward"),
    [
        ("fine. Score: 8", {}, 0.8),
        ("Score: 2? No. Score: 9", {}, 0.9),
        ("verdict: YES", {"verdict": r"verdict: (\w+)", "words": {"yes": 1.0, "no": 0.0}}, 1.0),
        ("Score: -5", {"bounds": (-1.0, 1.0)}, -0.5),
    ],
)
async def test_the_last_verdict_is_the_reward(answer: str, settings: dict[str, Any], reward: float) -> None:
    score = await graded(Judging(answer), **settings)
    assert (score.reward, score.metrics["judged"]) == (reward, 1.0)


async def test_the_question_holds_task_completion_and_answer_and_a_completion_cannot_ask_for_more() -> None:
    judging = Judging("Score: 1")
    await graded(judging, "{answer} {task}")
    assert judging.questions == [
        "Q: What is 3 + 4?\nA: {answer} {task}\nGold: 7\nEnd with `Score: N`, N from 0 to 10."
    ]


FAILURES = {
    "hangs": (asyncio.Event(), "timeout", "reward_timeout"),
    "rambles": ("I like it.", "garbage", "reward_error"),
    "says no number": ("Score: ...", "garbage", "reward_error"),
    "leaves the bounds": ("Score: 11", "garbage", "reward_error"),
    "refuses": ("I cannot grade this.", "refused", "reward_error"),
    "is filtered": (("", "content_filter"), "refused", "reward_error"),
    "raises": (OSError("connection reset"), "error", "reward_error"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_failure_is_named_and_follows_the_rule_of_the_recipe(case: str) -> None:
    answer, kind, reason = FAILURES[case]
    with pytest.raises(RewardFailed, match=f"judge_{kind}: ") as failed:
        await graded(Judging(answer), timeout_s=0.05)
    assert failed.value.reason == reason
    score = await graded(Judging(answer), timeout_s=0.05, on_failure=0.25)
    assert (score.reward, score.metrics) == (0.25, {"judged": 0.0, f"judge_{kind}": 1.0})


async def test_a_judge_without_a_verdict_is_asked_again() -> None:
    judging = Judging("hm", "Score: 5")
    assert (await graded(judging)).reward == 0.5
    with pytest.raises(RewardFailed, match="judge_garbage"):
        await graded(Judging("hm", "Score: 5"), attempts=1)


async def test_an_equal_question_is_asked_once_per_version_and_the_cache_is_bounded() -> None:
    judging, judge = Judging("Score: 5"), Judge(prompt=PROMPT, scale=10.0, cache_entries=2)
    seen = [(await graded(judging, text, judge)).metrics["judge_cached"] for text in "aabca"]
    assert seen == [0.0, 1.0, 0.0, 0.0, 0.0]
    judging.version = 1
    await graded(judging, "new", judge)
    assert (await graded(judging, "a", judge)).metrics["judge_cached"] == 0.0


@pytest.mark.parametrize("budget", [{"max_calls": 2}, {"max_tokens": 35}])
async def test_a_spent_budget_is_a_failure(budget: dict[str, int]) -> None:
    judging, judge = Judging("Score: 5"), Judge(prompt=PROMPT, scale=10.0, on_failure=0.0, **budget)
    scores = [await graded(judging, text, judge) for text in "abcd"]
    assert [score.reward for score in scores] == [0.5, 0.5, 0.0, 0.0]
    assert scores[-1].metrics["judge_budget"] == 1.0
    assert len(judging.questions) == 2


async def test_no_more_than_concurrency_questions_are_asked_at_once() -> None:
    gate = asyncio.Event()
    judging, judge = Judging(gate), Judge(prompt=PROMPT, concurrency=2, on_failure=0.0)
    asking = [asyncio.create_task(graded(judging, text, judge)) for text in "abcdef"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(judging.questions) == 2
    gate.set()
    await asyncio.gather(*asking)


@pytest.mark.parametrize("error", [MissingCapability("no endpoint"), PolicyUnavailable("down")])
async def test_what_costs_no_attempt_stays_so(error: Exception) -> None:
    with pytest.raises(type(error)):
        await graded(Judging(error), on_failure=0.0)


async def test_a_workflow_that_hands_over_no_judge_is_told_how() -> None:
    with pytest.raises(RewardFailed, match=r"call `reward\(task, text, policies=policies\)`"):
        await Judge(prompt=PROMPT)(TASK, "7")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"prompt": "grade"}, r"must hold \{completion\}"),
        ({"prompt": PROMPT, "verdict": "yes|no"}, "needs a group"),
        ({"prompt": PROMPT, "scale": 0.0}, "must not be 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Judge(**settings)
