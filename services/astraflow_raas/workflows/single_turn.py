"""One prompt, one completion, one verifiable reward: the workflow of most single-agent recipes.

Invariant: the trajectory is prompt and completion exactly as sampled; only the completion is trained on.
Named by a recipe as `astraflow_raas.workflows.single_turn:SingleTurn`; the node makes one and runs every
episode with it.
"""

from collections.abc import Mapping

from astraflow.errors import RecipeError
from astraflow.plugins import Episode, Policy, Scorer, TaskSpec, TrajectoryBuilder


class SingleTurn:
    """Encodes the task's messages, samples once, scores the text."""

    def __init__(self, *, reward: Scorer) -> None:
        self._reward = reward

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return one trajectory of the run's only role. Raises RecipeError when there are several."""
        turn = TrajectoryBuilder(_only(policies))
        turn.add_prompt(task.messages)
        result = await turn.generate()
        score = await self._reward(task, result.text, policies=policies)
        metrics = {"completion_tokens": float(turn.num_sampled), **score.metrics}
        return Episode((turn.build(reward=score.reward),), metrics)


def _only(policies: Mapping[str, Policy]) -> Policy:
    if len(policies) != 1:
        raise RecipeError(
            f"SingleTurn needs a run with exactly one role, this one has {', '.join(policies)}; "
            "name a workflow that knows which role does what"
        )
    (policy,) = policies.values()
    return policy
