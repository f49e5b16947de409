"""Many turns in an environment, as a recipe's own test would play them: scripted policy, no service, no engine."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from astraflow.environments import EnvironmentFailed
from astraflow.errors import InvalidArgumentError, RecipeError
from astraflow.plugins import Environment, Episode, Message, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.engine.base import EngineRefused
from astraflow_raas.environments.recipe_environments import RecipeEnvironments
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.workflows.multi_turn import MultiTurn, MultiTurnSettings
from support.agents import ScriptedPolicy

TASK = TaskSpec("t1", (Message("user", "Count."),), {"start": 0})
COUNTER = {"use": "support.environments:Counter", "with": {"goal": 6}}


def workflow(**settings: Any) -> MultiTurn:
    """The workflow of a recipe with these settings."""
    environments = RecipeEnvironments(RecipeSource(), served=ServedEnvironments())
    given = MultiTurnSettings.model_validate({"environment": COUNTER} | settings)
    return MultiTurn(settings=given, environments=environments)


def scripted(*words: str, **fields: Any) -> ScriptedPolicy:
    """Says these words, one a turn."""
    left = list(words)
    return ScriptedPolicy(lambda _prompt: left.pop(0), **fields)


def played(*words: str, **settings: Any) -> Episode:
    """An episode of these words."""
    return asyncio.run(workflow(**settings).run(TASK, {"solver": scripted(*words)}))


def ending(episode: Episode) -> str:
    """Why it ended, which the trajectory and the metrics say alike."""
    (trajectory,) = episode.trajectories
    assert episode.metrics[f"ending.{trajectory.finish_reason}"] == 1.0
    assert sum(value for name, value in episode.metrics.items() if name.startswith("ending.")) == 1.0
    return trajectory.finish_reason


def test_actions_are_trained_on_and_what_is_seen_is_not() -> None:
    episode = played("1", "2", "3")
    (trajectory,) = episode.trajectories
    assert [(span.role, span.reward) for span in trajectory.turn_spans] == [
        *(("user", 0.0), ("assistant", 1.0)),
        *(("user", 0.0), ("assistant", 2.0)),
        *(("user", 0.0), ("assistant", 3.0)),
    ]
    masks = [set(trajectory.loss_mask[span.start : span.end]) for span in trajectory.turn_spans]
    assert masks == [{False}, {True}] * 3
    assert ending(episode) == "done"
    assert (episode.metrics["turns"], episode.metrics["environment.sum"]) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("settings", "reward"),
    [
        ({}, 6.0),
        ({"rewards": "last"}, 3.0),
        ({"rewards": "discounted", "discount": 0.5}, 1 + 2 * 0.5 + 3 * 0.25),
    ],
)
def test_what_an_episode_earns_is_the_recipes_choice(settings: dict[str, Any], reward: float) -> None:
    assert played("1", "2", "3", **settings).trajectories[0].reward == reward


def test_an_episode_ends_after_its_last_turn() -> None:
    episode = played("1", "1", max_turns=2)
    assert (ending(episode), episode.metrics["turns"]) == ("max_turns", 2.0)


def test_an_episode_ends_when_its_time_is_over() -> None:
    assert ending(played("1", deadline_s=1e-9)) == "deadline"


def test_an_episode_ends_where_an_observation_leaves_no_room() -> None:
    prompt = len(scripted("").encode((*TASK.messages, Message("user", "sum 0"))))
    episode = played("1", "1", max_tokens=prompt + 20)
    assert ending(episode) == "max_tokens"
    assert len(episode.trajectories[0].token_ids) <= prompt + 20


def test_an_action_that_is_cut_off_is_not_carried_out() -> None:
    prompt = len(scripted("").encode((*TASK.messages, Message("user", "sum 0"))))
    episode = played("5" * 100, max_tokens=prompt + 4)
    assert (ending(episode), episode.trajectories[0].reward) == ("max_tokens", 0.0)
    assert len(episode.trajectories[0].token_ids) == prompt + 4


def test_a_context_shorter_than_max_tokens_ends_the_episode() -> None:
    policy = scripted("1", "1")
    generate = policy.generate

    async def short(prompt_ids: Any, *, max_new_tokens: int | None = None) -> Any:
        if policy.prompts:
            raise EngineRefused("prompt of 99 tokens, the context holds 64")
        return await generate(prompt_ids, max_new_tokens=max_new_tokens)

    policy.generate = short  # type: ignore[method-assign]
    episode = asyncio.run(workflow().run(TASK, {"solver": policy}))
    assert (ending(episode), episode.trajectories[0].reward) == ("max_tokens", 1.0)


def test_a_prompt_that_leaves_no_room_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the prompt of task t1 has .* tokens, max_tokens is 16"):
        played("1", max_tokens=16)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("1", "raise"), "Counter, turn 2: ValueError: the dungeon has no exit .environments.py"),
        (("flood",), "turn 1: ValueError: an observation has 2097152 bytes"),
        (("nan",), "turn 1: ValueError: reward nan is not finite"),
    ],
)
def test_an_environment_that_fails_is_named_with_its_turn(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(EnvironmentFailed, match=why):
        played(*words)


def test_an_environment_that_hangs_is_given_up() -> None:
    with pytest.raises(EnvironmentFailed, match=r"turn 0: no answer within turn_timeout_s 1"):
        played(environment="support.environments:Sleeper", turn_timeout_s=1.0)


def test_tool_calls_reach_the_environment_and_answers_the_policy() -> None:
    policy = scripted('<tool_call>{"name": "boil", "arguments": {}}</tool_call>', "Tea is ready.")
    tea = workflow(environment="support.environments:Kettle")
    episode = asyncio.run(tea.run(TASK, {"solver": policy}))
    assert policy.prompts[0].startswith("<tool boil>")
    assert "<tool>hot" in policy.prompts[1]
    assert (ending(episode), episode.trajectories[0].reward) == ("done", 1.0)


def test_it_does_not_guess_among_roles() -> None:
    with pytest.raises(RecipeError, match="exactly one role"):
        asyncio.run(workflow().run(TASK, {"a": scripted(), "b": scripted()}))


def test_every_episode_has_an_environment_of_its_own() -> None:
    made: list[Environment] = []

    class Environments(RecipeEnvironments):
        def maker(self, environment: PluginSettings, *, turn_timeout_s: float) -> Callable[[], Environment]:
            make = super().maker(environment, turn_timeout_s=turn_timeout_s)
            return lambda: made.append(make()) or made[-1]  # type: ignore[func-returns-value]

    environments = Environments(RecipeSource(), served=ServedEnvironments())
    settings = MultiTurnSettings.model_validate({"environment": COUNTER})
    playing = MultiTurn(settings=settings, environments=environments)
    for _ in range(2):
        asyncio.run(playing.run(TASK, {"solver": scripted("6")}))
    assert len({id(each) for each in made}) == 2
