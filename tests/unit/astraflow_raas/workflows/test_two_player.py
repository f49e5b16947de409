"""A game of two players: the game is an environment, each player has a trajectory, and who is trained has the `win`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astraflow.environments import EnvironmentFailed
from astraflow.errors import InvalidArgumentError
from astraflow.plugins import Episode, Message, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.environments.recipe_environments import RecipeEnvironments
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.workflows.two_player import TwoPlayer, TwoPlayerSettings
from support.agents import ScriptedPolicy
from support.docs_code import recipe_folder

TASK = TaskSpec("t1", (Message("user", "Say a number."),))


def player(role: str, *moves: str, wanted: bool = True) -> ScriptedPolicy:
    left = list(moves)
    return ScriptedPolicy(lambda _prompt: left.pop(0), role=role, wants_trajectory=wanted)


def played(first: ScriptedPolicy, second: ScriptedPolicy, **settings: Any) -> Episode:
    """An episode of a game in which whoever says 5 wins, and every move shows the other player what was said."""
    given = {"game": PluginSettings(use="support.environments:SayFive")} | settings
    environments = RecipeEnvironments(RecipeSource(), served=ServedEnvironments())
    workflow = TwoPlayer(settings=TwoPlayerSettings.model_validate(given), environments=environments)
    return asyncio.run(workflow.run(TASK, dict(zip(workflow.roles, (first, second), strict=True))))


def earned(episode: Episode) -> dict[str, float]:
    return {item.role: item.reward for item in episode.trajectories}


def test_players_move_in_turns_and_see_what_the_other_said() -> None:
    first, second = player("first", "1", "5"), player("second", "2")
    episode = played(first, second)
    assert second.prompts == ["<user>Say a number.¶<user>said 1¶<assistant>"]
    assert first.prompts[1] == "<user>Say a number.¶<user>begin¶<assistant>1¶<user>said 2¶<assistant>"
    assert earned(episode) == {"first": 1.0, "second": 0.0}
    assert episode.metrics == {"turns": 3.0, "first_win": 1.0, "game.sum": 8.0}
    assert [span.role for span in episode.trajectories[0].turn_spans] == ["user", "assistant"] * 2


@pytest.mark.parametrize(("wanted", "win"), [("first", 0.0), ("second", 1.0)])
def test_the_score_of_the_only_player_that_is_trained_is_the_win(wanted: str, win: float) -> None:
    first, second = (
        player(role, move, wanted=role == wanted) for role, move in [("first", "1"), ("second", "5")]
    )
    episode = played(first, second)
    assert (earned(episode), episode.metrics["win"]) == ({wanted: win}, win)


def test_roles_that_changed_their_seats_keep_their_names() -> None:
    episode = played(player("rival", "5", wanted=False), player("solver", "1"), roles=("solver", "rival"))
    assert (episode.metrics["first_win"], episode.trajectories) == (1.0, ())


def test_nothing_is_played_for_nobody() -> None:
    first, second = player("first", wanted=False), player("second", wanted=False)
    assert played(first, second) == Episode(())


def test_rewards_of_moves_are_added_to_the_score() -> None:
    assert earned(played(player("first", "bonus"), player("second", "5"))) == {"first": 0.25, "second": 1.0}


def test_a_game_that_does_not_end_in_time_is_a_draw() -> None:
    episode = played(player("first", "1", "1"), player("second", "1"), max_turns=3)
    assert (earned(episode), episode.metrics["turns"]) == ({"first": 0.5, "second": 0.5}, 3.0)


def test_who_has_no_room_left_to_move_has_lost() -> None:
    first, second = player("first", "1"), player("second", "2" * 40)
    prompt = len(first.encode((*TASK.messages, Message("user", "begin"))))
    assert earned(played(first, second, max_tokens=prompt + 20)) == {"first": 0.0, "second": 1.0}
    with pytest.raises(InvalidArgumentError, match=r"role .first. has .* tokens, max_tokens is 16; raise it"):
        played(player("first"), player("second"), max_tokens=16)


@pytest.mark.parametrize(("move", "score"), [("over", "nan"), ("over 2", "2.0")])
def test_a_game_that_ends_without_a_score_fails_the_attempt(move: str, score: str) -> None:
    with pytest.raises(
        EnvironmentFailed, match=f"its metric 'win' is {score}; give what the first seat scored"
    ):
        played(player("first", move), player("second"))


def test_a_game_that_shows_nothing_fails_the_attempt() -> None:
    with pytest.raises(EnvironmentFailed, match="the game showed nothing after a move"):
        played(player("first", "1"), player("second", "silence"))


def test_the_game_of_the_documentation_is_played(tmp_path: Path) -> None:
    nim = PluginSettings.model_validate({"use": "recipe:Nim"})
    source = RecipeSource(folder=recipe_folder(tmp_path, "roles.md"))
    environments = RecipeEnvironments(source, served=ServedEnvironments())
    workflow = TwoPlayer(settings=TwoPlayerSettings(game=nim), environments=environments)
    task = TaskSpec("t1", (), {"sticks": 5})
    policies = {"first": player("first", "1", "3"), "second": player("second", "1")}
    assert asyncio.run(workflow.run(task, policies)).metrics["first_win"] == 1.0
    policies = {"first": player("first", "2"), "second": player("second", "all of them")}
    assert asyncio.run(workflow.run(task, policies)).metrics["first_win"] == 1.0


def test_two_seats_need_two_roles() -> None:
    with pytest.raises(ValueError, match="give two different ones"):
        TwoPlayerSettings(game=PluginSettings(use="x:Y"), roles=("a", "a"))
