"""Two games in one task: what each policy is shown and earns does not depend on the other one."""

import asyncio

import pytest

from astraflow.plugins import Episode, Message, RewardedRows, TaskSpec
from astraflow_bench.side_by_side import SideBySide, Sleeping
from astraflow_raas.grading.scoring import RewardScorer
from support.agents import ScriptedPolicy

RIGHT = 42


def play(
    number: int, *, answer: str, verdict: str, trained: tuple[str, ...]
) -> tuple[Episode, dict[str, str]]:
    """An episode of task `number`, and what each role was asked."""
    task = TaskSpec(f"train-{number}", (Message("user", "82 - 40?"),), {"difference": RIGHT})
    workflow = SideBySide(
        reward=RewardScorer(lambda task, text: float(text == str(RIGHT))),
        verifier_prompt="{problem} {answer}",
    )
    says = {"solver": answer, "verifier": verdict}
    asked: dict[str, str] = {}

    def policy(role: str) -> ScriptedPolicy:
        def reply(prompt: str) -> str:
            asked[role] = prompt
            return says[role]

        return ScriptedPolicy(reply, name=role, role=role, wants_trajectory=role in trained)

    episode = asyncio.run(workflow.run(task, {role: policy(role) for role in says}))
    return episode, asked


def test_a_policy_meets_the_same_whether_the_other_is_trained_or_not() -> None:
    for number in range(20):
        both, asked = play(number, answer="42", verdict="approve", trained=("solver", "verifier"))
        assert [item.role for item in both.trajectories] == ["solver", "verifier"]
        for row in both.trajectories:
            alone, asked_alone = play(number, answer="42", verdict="approve", trained=(row.role,))
            assert [(item.role, item.reward) for item in alone.trajectories] == [(row.role, row.reward)]
            assert asked_alone == {row.role: asked[row.role]}


def test_a_verdict_earns_by_being_right_and_half_of_the_proposals_are() -> None:
    proposals, rewards = [], []
    for number in range(200):
        episode, asked = play(
            number, answer="41", verdict="add back: APPROVE", trained=("solver", "verifier")
        )
        solved, judged = episode.trajectories
        assert solved.reward == 0.0
        proposals.append(int(asked["verifier"].split("¶")[0].split()[-1]))
        rewards.append(judged.reward)
    assert rewards == [float(proposal == RIGHT) for proposal in proposals]
    assert sum(rewards) == pytest.approx(100, abs=30)
    assert {abs(proposal - RIGHT) for proposal in proposals} == {0, 1, 10}


def test_a_step_takes_its_time_and_has_rows_of_both_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr("astraflow_bench.side_by_side.time.sleep", slept.append)
    rows = RewardedRows(rewards=[0.0] * 4, groups=[0, 0, 1, 1], lengths=[3] * 4)
    assert list(Sleeping(seconds=1.5)(rows)) == [1.0, -1.0, 1.0, -1.0]
    assert slept == [1.5]
