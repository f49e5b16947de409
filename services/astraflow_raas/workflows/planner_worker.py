"""A planner writes a plan, workers follow it; often two roles of one policy.

Invariant: a plan earns the mean reward of the answers that followed it, an answer its own. Named by a recipe as
`astraflow_raas.workflows.planner_worker:PlannerWorker`; docs/roles.md describes it.
"""

import asyncio
from collections.abc import Mapping
from statistics import fmean

from astraflow.plugins import Episode, Message, Policy, Scorer, TaskSpec, TrajectoryBuilder
from astraflow_raas.workflows.prompts import fill, problem_of, require_places

_PLANNER_PROMPT = """\
{problem}

Write a short plan for somebody else who solves this. Do not solve it."""
_WORKER_PROMPT = """\
{problem}

Follow this plan:
{plan}"""
_MAX_ANSWERS = 63


class PlannerWorker:
    """Plays roles `planner` and `worker`: one plan, then `answers` answers to it, sampled side by side.

    The planner sees `planner_prompt` (place `{problem}`), a worker `worker_prompt` (places `{problem}`, `{plan}`).
    """

    roles = ("planner", "worker")

    def __init__(
        self,
        *,
        reward: Scorer,
        answers: int = 1,
        planner_prompt: str = _PLANNER_PROMPT,
        worker_prompt: str = _WORKER_PROMPT,
    ) -> None:
        if not 1 <= answers <= _MAX_ANSWERS:
            raise ValueError(f"answers is {answers}; give 1 to {_MAX_ANSWERS}")
        require_places("planner_prompt", planner_prompt, "problem")
        require_places("worker_prompt", worker_prompt, "plan")
        self._reward = reward
        self._answers = answers
        self._planner_prompt = planner_prompt
        self._worker_prompt = worker_prompt

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return the plan and its answers, of the roles that want them."""
        planner, worker = policies["planner"], policies["worker"]
        problem = problem_of(task.messages)
        planning = TrajectoryBuilder(planner)
        planning.add_prompt([Message("user", fill(self._planner_prompt, problem=problem))])
        plan = (await planning.generate()).text
        prompt = [Message("user", fill(self._worker_prompt, problem=problem, plan=plan))]
        answers = [TrajectoryBuilder(worker) for _ in range(self._answers)]
        for answer in answers:
            answer.add_prompt(prompt)
        results = await asyncio.gather(*(answer.generate() for answer in answers))
        scored = (self._reward(task, result.text, policies=policies) for result in results)
        rewards = [score.reward for score in await asyncio.gather(*scored)]
        trajectories = [planning.build(reward=fmean(rewards))] if planner.wants_trajectory else []
        if worker.wants_trajectory:
            trajectories += [
                answer.build(reward=earned) for answer, earned in zip(answers, rewards, strict=True)
            ]
        return Episode(
            tuple(trajectories), {"team": fmean(rewards), "plan_tokens": float(planning.num_sampled)}
        )
