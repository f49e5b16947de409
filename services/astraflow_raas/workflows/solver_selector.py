"""A solver answers several times, a selector picks one of the answers.

Invariant: every answer earns the recipe's reward, whatever is picked; a choice earns more than half only where there
was a wrong one. Named by a recipe as
`astraflow_raas.workflows.solver_selector:SolverSelector`; docs/roles.md describes it.
"""

import asyncio
import re
from collections.abc import Mapping
from statistics import fmean
from string import ascii_uppercase

from astraflow.plugins import Episode, Message, Policy, PolicyUnavailable, Scorer, TaskSpec, TrajectoryBuilder
from astraflow_raas.workflows.prompts import fill, problem_of, require_places

_SELECTOR_PROMPT = """\
Problem:
{problem}

{answers}

Which answer is right? Compare them, and end with its letter alone."""
_ANSWER_PROMPT = "Answer {letter}:\n{answer}"


class SolverSelector:
    """Plays roles `solver` and `selector`: `answers` answers side by side, then one choice among them.

    The selector sees `selector_prompt` (places `{problem}` and `{answers}`), where each answer is `answer_prompt`
    (places `{letter}` and `{answer}`), with `separator` between them. The last letter of an answer that stands alone in
    what it says is its choice. It earns 1 for an answer that is right where another is wrong, 0.5 where all are alike,
    0 for a wrong one and for no choice; right is a reward of `correct_from` or more.
    """

    roles = ("solver", "selector")

    def __init__(
        self,
        *,
        reward: Scorer,
        answers: int = 2,
        selector_prompt: str = _SELECTOR_PROMPT,
        answer_prompt: str = _ANSWER_PROMPT,
        separator: str = "\n\n",
        correct_from: float = 1.0,
    ) -> None:
        if not 2 <= answers <= len(ascii_uppercase):
            raise ValueError(f"answers is {answers}; give 2 to {len(ascii_uppercase)}")
        require_places("selector_prompt", selector_prompt, "problem", "answers")
        require_places("answer_prompt", answer_prompt, "letter", "answer")
        self._reward, self._correct_from = reward, correct_from
        self._letters = ascii_uppercase[:answers]
        self._selector_prompt, self._answer_prompt, self._separator = (
            selector_prompt,
            answer_prompt,
            separator,
        )
        self._choice = re.compile(rf"(?<![A-Za-z])[{self._letters}](?![A-Za-z])")

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return the answers and the choice, of the roles that want them.

        Nobody chooses where the selector's trajectory is not wanted, or cannot be had.
        """
        solver, selector = policies["solver"], policies["selector"]
        answers = [TrajectoryBuilder(solver) for _ in self._letters]
        for answer in answers:
            answer.add_prompt(task.messages)
        texts = [result.text for result in await asyncio.gather(*(each.generate() for each in answers))]
        scored = (self._reward(task, text, policies=policies) for text in texts)
        rewards = [score.reward for score in await asyncio.gather(*scored)]
        pairs = zip(answers, rewards, strict=True)
        trajectories = [each.build(reward=earned) for each, earned in pairs if solver.wants_trajectory]
        metrics = {"first": rewards[0], "any": max(rewards), "mean": fmean(rewards)}
        if not selector.wants_trajectory:
            return Episode(tuple(trajectories), metrics)
        choosing = TrajectoryBuilder(selector)
        choosing.add_prompt([Message("user", self._prompt(task, texts))])
        try:
            said = (await choosing.generate()).text
        except PolicyUnavailable:
            if not trajectories:
                raise
            return Episode(tuple(trajectories), metrics)
        picked = self._picked(said)
        trajectories.append(choosing.build(reward=self._earned(picked, rewards)))
        # Whoever cannot be understood leaves it at the first answer.
        metrics |= {"team": rewards[picked or 0], "unparsable": float(picked is None)}
        return Episode(tuple(trajectories), metrics)

    def _prompt(self, task: TaskSpec, texts: list[str]) -> str:
        shown = (
            fill(self._answer_prompt, letter=letter, answer=text)
            for letter, text in zip(self._letters, texts, strict=True)
        )
        return fill(
            self._selector_prompt, problem=problem_of(task.messages), answers=self._separator.join(shown)
        )

    def _picked(self, said: str) -> int | None:
        letters = self._choice.findall(said)
        return self._letters.index(letters[-1]) if letters else None

    def _earned(self, picked: int | None, rewards: list[float]) -> float:
        right = [reward >= self._correct_from for reward in rewards]
        if picked is None:
            return 0.0
        return 0.5 if all(right) or not any(right) else float(right[picked])
