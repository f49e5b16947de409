"""One prompt, one completion, one verifiable reward: the workflow of most single-agent recipes.

Invariant: the trajectory is prompt and completion exactly as sampled; only the completion is trained on.
Named by a recipe as `astraflow_raas.workflows.single_turn:SingleTurn`; the node makes one and runs every
episode with it.
"""

from collections.abc import Mapping

from astraflow.errors import RecipeError
from astraflow.plugins import Episode, Policy, Scorer, TaskSpec, TrajectoryBuilder


class SingleTurn:
    """Encodes the task's messages, samples once, scores the text. `role` answers; empty is the only one."""

    def __init__(self, *, reward: Scorer, role: str = "") -> None:
        self._reward = reward
        self._role = role

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return one trajectory. Raises RecipeError when nothing says which role it is of."""
        turn = TrajectoryBuilder(chosen_policy(policies, self._role))
        turn.add_prompt(task.messages)
        result = await turn.generate()
        score = await self._reward(task, result.text, policies=policies)
        metrics = {"completion_tokens": float(turn.num_sampled), **score.metrics}
        return Episode((turn.build(reward=score.reward),), metrics)


def chosen_policy(policies: Mapping[str, Policy], role: str) -> Policy:
    """The policy of the role, empty for the only one. Raises RecipeError when nothing says which."""
    if role in policies:
        return policies[role]
    if role or len(policies) != 1:
        raise RecipeError(
            f"the workflow needs a run with exactly one role, or `role` set to one of {', '.join(policies)} (it is "
            f"{role!r}); or name a workflow that knows which role does what"
        )
    (policy,) = policies.values()
    return policy
