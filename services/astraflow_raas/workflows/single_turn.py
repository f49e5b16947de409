"""One prompt, one completion, one verifiable reward: the workflow of most single-agent recipes.

Invariant: the trajectory is prompt and completion exactly as sampled; only the completion is trained on.
Named by a recipe as `astraflow_raas.workflows.single_turn:SingleTurn`; the node makes one and runs every
episode with it.
"""

from collections.abc import Mapping

from astraflow.errors import RecipeError
from astraflow.plugins import Episode, Policy, Reward, TaskSpec, Trajectory, VersionSpan


class SingleTurn:
    """Encodes the task's messages, samples once, scores the text."""

    def __init__(self, *, reward: Reward) -> None:
        self._reward = reward

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return one trajectory of the run's only policy. Raises RecipeError when there are several."""
        policy = _only(policies)
        prompt = policy.encode(task.messages)
        result = await policy.generate(prompt)
        num_prompt, num_new = len(prompt), len(result.token_ids)
        trajectory = Trajectory(
            policy=policy.name,
            token_ids=(*prompt, *result.token_ids),
            loss_mask=(False,) * num_prompt + (True,) * num_new,
            logprobs=(0.0,) * num_prompt + result.logprobs,
            version_spans=tuple(
                VersionSpan(span.start + num_prompt, span.end + num_prompt, span.version)
                for span in result.version_spans
            ),
            reward=self._reward(task, result.text),
            finish_reason=result.finish_reason,
        )
        return Episode((trajectory,), {"completion_tokens": float(num_new)})


def _only(policies: Mapping[str, Policy]) -> Policy:
    if len(policies) != 1:
        raise RecipeError(
            f"SingleTurn needs a run with exactly one policy, this one has {', '.join(policies)}; "
            "name a workflow that knows which policy does what"
        )
    (policy,) = policies.values()
    return policy
