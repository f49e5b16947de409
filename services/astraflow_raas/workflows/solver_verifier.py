"""A solver answers, a verifier judges the answer, and a rejected solver tries again.

Invariant: every answer is a trajectory of the solver's group and every verdict one of the verifier's; an answer earns
the recipe's reward whatever the verifier says, a verdict earns by being right about that reward. Named by a recipe as
`astraflow_raas.workflows.solver_verifier:SolverVerifier`; docs/roles.md describes it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from astraflow.plugins import (
    Episode,
    Message,
    Policy,
    PolicyUnavailable,
    Scorer,
    TaskSpec,
    Trajectory,
    TrajectoryBuilder,
)
from astraflow_raas.workflows.prompts import fill, problem_of, require_places

_VERIFIER_PROMPT = """\
Problem:
{problem}

Proposed answer:
{answer}

Check the answer step by step. End with APPROVE if it is correct, with REJECT if it is not."""
_RETRY_PROMPT = """\
Somebody who checked your answer rejected it:
{verdict}

Solve the problem again."""


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """One verdict: whether it approves (None: it says neither), and whether the answer was correct."""

    approves: bool | None
    answer_is_correct: bool

    @property
    def is_right(self) -> bool:
        return self.approves is self.answer_is_correct


class SolverVerifier:
    """Plays roles `solver` and `verifier`: an answer, a verdict, and up to `max_retries` further answers.

    `retry` says what a rejected solver sees: `feedback`, its answer with `retry_prompt` (place `{verdict}`), or
    `fresh`, the problem alone. The verifier sees `verifier_prompt` (places `{problem}` and `{answer}`); of an answer it
    sees the last match of the regular expression `answer_shown`, or of its group, and all where nothing matches. Of the
    words `approve` and `reject`, whole and in any case, the last in its text is the verdict. An answer is correct if
    its reward is at least `correct_from`. A right approval earns 1, a right rejection `rejection_reward`.
    """

    roles = ("solver", "verifier")

    def __init__(
        self,
        *,
        reward: Scorer,
        max_retries: int = 1,
        retry: Literal["feedback", "fresh"] = "feedback",
        verifier_prompt: str = _VERIFIER_PROMPT,
        retry_prompt: str = _RETRY_PROMPT,
        answer_shown: str = "",
        approve: str = "approve",
        reject: str = "reject",
        correct_from: float = 1.0,
        rejection_reward: float = 1.0,
    ) -> None:
        if not 0 <= max_retries <= _MAX_RETRIES:
            raise ValueError(f"max_retries is {max_retries}; give 0 to {_MAX_RETRIES}")
        if not rejection_reward > 0:
            raise ValueError(f"rejection_reward is {rejection_reward}; give more than 0")
        if not approve.strip() or not reject.strip() or approve.lower() == reject.lower():
            raise ValueError(f"approve {approve!r} and reject {reject!r} must be two different words")
        require_places("verifier_prompt", verifier_prompt, "answer")
        self._reward = reward
        self._max_retries = max_retries
        self._shows_feedback = retry == "feedback"
        self._verifier_prompt = verifier_prompt
        self._retry_prompt = retry_prompt
        self._answer_shown = re.compile(answer_shown) if answer_shown else None
        self._approve = approve.lower()
        self._verdict = re.compile(rf"(?<!\w)({re.escape(approve)}|{re.escape(reject)})(?!\w)", re.IGNORECASE)
        self._correct_from = correct_from
        self._rejection_reward = rejection_reward

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return the trajectories of the roles that want them.

        The last answer is judged only if the verifier's trajectory is wanted and there was no other to judge. Without
        a verifier there is no further answer and no metric: an episode that was cut short says nothing of the team.
        """
        solver, verifier = policies["solver"], policies["verifier"]
        messages, trajectories = task.messages, list[Trajectory]()
        rewards, verdicts = list[float](), list[_Judged]()
        while True:
            answering, answer = await _ask(solver, messages)
            score = await self._reward(task, answer, policies=policies)
            rewards.append(score.reward)
            if solver.wants_trajectory:
                trajectories.append(answering.build(reward=rewards[-1]))
            is_last = len(rewards) > self._max_retries
            if is_last and (verdicts or not verifier.wants_trajectory):
                break
            try:
                judging, verdict = await _ask(verifier, self._verifier_messages(task, answer))
            except PolicyUnavailable:
                if not trajectories:
                    raise
                return Episode(tuple(trajectories))
            verdicts.append(self._judge(verdict, answer_reward=rewards[-1]))
            if verifier.wants_trajectory:
                trajectories.append(judging.build(reward=self._earned(verdicts[-1])))
            if is_last or verdicts[-1].approves is not False:
                break
            if self._shows_feedback:
                rejection = Message("user", fill(self._retry_prompt, verdict=verdict))
                messages = (*task.messages, Message("assistant", answer), rejection)
        return Episode(tuple(trajectories), {**score.metrics, **_metrics(rewards, verdicts)})

    def _verifier_messages(self, task: TaskSpec, answer: str) -> Sequence[Message]:
        matches = list(self._answer_shown.finditer(answer)) if self._answer_shown else []
        shown = matches[-1][matches[-1].lastindex or 0] if matches else answer
        problem = problem_of(task.messages)
        return [Message("user", fill(self._verifier_prompt, problem=problem, answer=shown))]

    def _judge(self, verdict: str, *, answer_reward: float) -> _Judged:
        words = self._verdict.findall(verdict)
        approves = words[-1].lower() == self._approve if words else None
        return _Judged(approves=approves, answer_is_correct=answer_reward >= self._correct_from)

    def _earned(self, judged: _Judged) -> float:
        if not judged.is_right:
            return 0.0
        return 1.0 if judged.approves else self._rejection_reward


_MAX_RETRIES = 31
"""With a verdict for each, an episode has at most 64 trajectories."""


async def _ask(policy: Policy, messages: Sequence[Message]) -> tuple[TrajectoryBuilder, str]:
    turn = TrajectoryBuilder(policy)
    turn.add_prompt(messages)
    result = await turn.generate()
    return turn, result.text


def _metrics(rewards: Sequence[float], verdicts: Sequence[_Judged]) -> Mapping[str, float]:
    """`team`: reward of the last answer, `first`: of the first; the others are shares, where there is a case."""
    shares = {
        "approve": [judged.approves is not False for judged in verdicts],
        "unparsable": [judged.approves is None for judged in verdicts],
        "correct_approved": [judged.is_right for judged in verdicts if judged.answer_is_correct],
        "wrong_rejected": [judged.is_right for judged in verdicts if not judged.answer_is_correct],
    }
    counted = {name: fmean(cases) for name, cases in shares.items() if cases}
    return {"team": rewards[-1], "first": rewards[0], "retry": len(rewards) - 1.0, **counted}
