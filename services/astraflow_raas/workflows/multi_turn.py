"""Many turns in an environment: the workflow of most agentic recipes.

Invariant: the trajectory is tokens in and tokens out, one turn after the other; what the environment shows is never
trained on; every episode ends for a reason with a name, and a prompt never grows beyond `max_tokens`. Named by a recipe
as `astraflow_raas.workflows.multi_turn:MultiTurn`; the node makes one and runs every episode with it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from astraflow.environments import EnvironmentFailed, Environments
from astraflow.errors import AstraflowError, InvalidArgumentError, RecipeError
from astraflow.plugins import (
    Environment,
    Episode,
    GenerateResult,
    Message,
    Observation,
    Policy,
    Scorer,
    TaskSpec,
    Tool,
    TrajectoryBuilder,
)
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_raas.workflows.prompts import off_the_loop_if_long

DONE, MAX_TURNS, MAX_TOKENS, DEADLINE = ENDINGS = ("done", "max_turns", "max_tokens", "deadline")
"""How an episode may end; one whose environment fails is no episode (`environment_failed`)."""


class MultiTurnSettings(BaseModel):
    """What a recipe gives under `with`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: PluginSettings
    """An `Environment` plug-in, or `served:Name` for one that the node knows by its settings."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Actions of an episode."""
    max_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 4096
    """Tokens of an episode: prompt, actions and observations. At most what the engine takes."""
    turn_timeout_s: Annotated[float, Field(ge=1, le=600)] = 30.0
    """Seconds the environment may take for a reset or an action."""
    deadline_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Seconds after which no turn begins, and what was earned counts; 0: only `raas.episode_timeout_s`, which fails."""
    rewards: Literal["sum", "last", "discounted"] = "sum"
    """What the episode earns: all rewards of its turns, the last one, or all with `discount` per turn."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.99
    """What a reward one turn later is worth."""

    def total(self, rewards: Sequence[float]) -> float:
        """What an episode with these rewards earns."""
        if self.rewards == "last":
            return rewards[-1]
        discount = self.discount if self.rewards == "discounted" else 1.0
        return sum(reward * discount**turn for turn, reward in enumerate(rewards))


class MultiTurn:
    """Lets the run's only policy act until the episode ends."""

    def __init__(
        self, *, settings: MultiTurnSettings, environments: Environments, reward: Scorer | None = None
    ) -> None:
        """`reward`, where the recipe names one, grades the last answer on top of what the environment gave."""
        self._settings = settings
        self._make = environments.maker(settings.environment, turn_timeout_s=settings.turn_timeout_s)
        self._reward = reward

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return one trajectory of the run's only role. Raises RecipeError when there are several."""
        policy = _only(policies)
        environment = self._make()
        try:
            play = _Play(policy, environment, settings=self._settings)
            await play.begin(task)
            while not play.ending:
                await play.turn()
        finally:
            await environment.close()
        earned = self._settings.total(play.rewards)
        if self._reward is not None:
            score = await self._reward(task, play.said, policies=policies)
            earned += score.reward
            play.metrics.update(score.metrics)
        return play.episode(earned)


class _Play:
    """One episode as far as it got."""

    def __init__(self, policy: Policy, environment: Environment, *, settings: MultiTurnSettings) -> None:
        self._policy = policy
        self._environment = environment
        self._settings = settings
        self._turns = TrajectoryBuilder(policy)
        self._tools: Sequence[Tool] = ()
        self._began_s = asyncio.get_running_loop().time()
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        """Named numbers for people."""
        self.said = ""
        """The text of the newest turn."""
        self.ending = ""
        """Why it is over; empty while it goes on."""

    async def begin(self, task: TaskSpec) -> None:
        """Build the prompt from the task and what is seen first."""
        seen = await self._environment.reset(task)
        if seen.done:
            raise EnvironmentFailed(f"the environment was done before the first turn of task {task.task_id}")
        self._tools = seen.tools
        self._turns = TrajectoryBuilder(self._policy, tools=seen.tools)
        messages = (*task.messages, *seen.messages)
        await off_the_loop_if_long(messages, lambda: self._turns.add_prompt(messages))
        num_tokens = len(self._turns.token_ids)
        if num_tokens >= self._settings.max_tokens:
            raise InvalidArgumentError(
                f"the prompt of task {task.task_id} has {num_tokens} tokens, max_tokens is "
                f"{self._settings.max_tokens}; raise it, or shorten what the environment shows"
            )

    async def turn(self) -> None:
        """Say something and see what it does; sets `ending` when that was the last turn."""
        prompt_ids = self._turns.token_ids
        room = self._settings.max_tokens - len(prompt_ids)
        try:
            result = await self._turns.generate(max_new_tokens=min(room, self._policy.max_new_tokens))
        except AstraflowError as error:
            # The engine's context is shorter than max_tokens: what was sampled so far is an episode.
            if error.reason != "ENGINE_REFUSED" or not self.rewards:
                raise
            self.ending = MAX_TOKENS
            return
        self.said = result.text
        if result.finish_reason == "length" and len(result.token_ids) >= room:
            self.rewards.append(0.0)  # it was cut off in the middle of what it wanted to do
            self.ending = MAX_TOKENS
            return
        seen = await self._environment.step(self._action(result, prompt_ids))
        self._turns.reward_turn(seen.reward)
        self.rewards.append(seen.reward)
        self.metrics = {f"environment.{name}": value for name, value in seen.metrics.items()}
        self.ending = self._ending_after(seen) or await self._show(seen.messages)

    def episode(self, reward: float) -> Episode:
        """What was played, with what it earned."""
        trajectory = replace(self._turns.build(reward=reward), finish_reason=self.ending)
        endings = {f"ending.{name}": float(name == self.ending) for name in ENDINGS}
        counts = {"turns": float(len(self.rewards)), "completion_tokens": float(self._turns.num_sampled)}
        return Episode((trajectory,), {**counts, **endings, **self.metrics})

    def _action(self, result: GenerateResult, prompt_ids: Sequence[int]) -> Message:
        if not self._tools:
            return Message("assistant", result.text)
        return self._policy.read(result.token_ids, tools=self._tools, prompt_ids=prompt_ids)

    def _ending_after(self, seen: Observation) -> str:
        if seen.done:
            return DONE
        if len(self.rewards) >= self._settings.max_turns:
            return MAX_TURNS
        spent_s = asyncio.get_running_loop().time() - self._began_s
        return DEADLINE if 0 < self._settings.deadline_s <= spent_s else ""

    async def _show(self, messages: Sequence[Message]) -> str:
        """Add what is seen; the ending if it leaves no room for a turn."""
        limit = self._settings.max_tokens
        fits = await off_the_loop_if_long(
            messages, lambda: self._turns.add_messages(messages, max_tokens=limit)
        )
        return "" if fits else MAX_TOKENS


def _only(policies: Mapping[str, Policy]) -> Policy:
    if len(policies) != 1:
        raise RecipeError(
            f"MultiTurn needs a run with exactly one role, this one has {', '.join(policies)}; "
            "name a workflow that knows which role does what"
        )
    (policy,) = policies.values()
    return policy
