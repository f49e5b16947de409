"""Answers that somebody else wrote, learned by heart: supervised fine-tuning through the services of a run.

Invariant: what a training task shows is all that is trained on, in the policy's own tokens; an evaluation samples.
Named by a recipe as `astraflow_raas.workflows.demonstrated:Demonstrated`, beside `trainer.algorithm: {preset: sft}`.
"""

from collections.abc import Mapping

from astraflow.plugins import Episode, Policy, Scorer, TaskSpec, TrajectoryBuilder
from astraflow_raas.workflows.single_turn import SingleTurn, chosen_policy


class Demonstrated:
    """Pushes the text `data[key]` of a training task as the answer, with the reward that it would earn."""

    def __init__(self, *, reward: Scorer, role: str = "", key: str = "completion") -> None:
        self._sampled = SingleTurn(reward=reward, role=role)
        self._reward, self._role, self._key = reward, role, key

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return one trajectory. Raises ValueError for a training task that shows nothing."""
        policy = chosen_policy(policies, self._role)
        if policy.is_evaluation:
            return await self._sampled.run(task, policies)
        text = task.data.get(self._key)
        if not isinstance(text, str):
            raise ValueError(
                f"data[{self._key!r}] of training task {task.task_id} is {text!r}; the data set gives each training "
                "task the text that is to be learned"
            )
        turn = TrajectoryBuilder(policy)
        turn.add_prompt(task.messages)
        turn.add_generation(policy.demonstrate(text), prompt_ids=turn.token_ids)
        score = await self._reward(task, text, policies=policies)
        metrics = {"completion_tokens": float(turn.num_sampled), **score.metrics}
        return Episode((turn.build(reward=score.reward),), metrics)
