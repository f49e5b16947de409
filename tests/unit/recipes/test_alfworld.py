"""The recipe of ALFWorld: its games in a service of their own, and a generated household at small size."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from astraflow.data.task_files import read_rows
from astraflow.errors import PluginError, RecipeError
from astraflow_environment.adapters import text_games
from support.environments import served_environment
from support.recipes import played, recipe_code, task_data
from support.source_tree import REPOSITORY

recipe = recipe_code("alfworld")
PYTHON = REPOSITORY / ".venv-env" / "bin" / "python"
FIELDS = {"id": str, "walkthrough": list, "task": str}


def scripted(lines: Sequence[str], prompts: list[str]) -> Callable[[str], str]:
    """Says one line after the other, and keeps what it was asked."""
    left = iter(lines)

    def say(prompt: str) -> str:
        prompts.append(prompt)
        return next(left)

    return say


@pytest.mark.ci
@pytest.mark.skipif(not PYTHON.exists(), reason="run `make text-games-env`")
async def test_a_walkthrough_wins_a_game_nobody_trained_on_and_idling_does_not(tmp_path: Path) -> None:
    folder = task_data("alfworld")
    rows = read_rows(folder / "valid_unseen.jsonl", fields=FIELDS, remedy="")
    use, settings = "astraflow_environment.adapters.text_games:AlfWorld", {"games": str(folder)}
    where = (f"run.dataset.with.folder={folder}", "run.dataset.with.train=train720")
    async with (
        served_environment(tmp_path, use=use, python=PYTHON, **settings) as service,
        played(
            "alfworld", *where, scratch=tmp_path, served={text_games.AlfWorld.__name__: service.address}
        ) as alfworld,
    ):
        task = alfworld.dataset.heldout(3)
        assert task is not None
        assert (task.data["game"], task.source) == (rows[3]["id"], "look_at_obj_in_light")
        for said, reward in ((rows[3]["walkthrough"], 1.0), (["inventory"] * 15, 0.0)):
            prompts: list[str] = []
            episode = await alfworld.episode(task, agent=scripted(said, prompts))
            (trajectory,) = episode.trajectories
            assert (trajectory.policy, trajectory.reward) == ("agent", reward)
            assert rows[3]["task"] in prompts[0]
            assert "Commands: " in prompts[-1]


def test_games_are_found_as_alfworld_lays_them_out_and_as_json_lines(tmp_path: Path) -> None:
    for split, number in (("train", 3), ("valid_unseen", 1)):
        for trial in range(number):
            game = tmp_path / split / "pick_and_place_simple-Mug-None-Desk-1" / f"trial_{trial}"
            game.mkdir(parents=True)
            (game / "game.tw-pddl").write_text('{"solvable": true}')
    for name, content in (
        ("pick_and_place_simple-Pen-None-Bed-1", '{"solvable": false}'),
        ("pick_and_place_simple-Pot-None-Bed-1", "{}"),
        ("pick_and_place_with_movable_recep-Pen-Cup-Bed-1", '{"solvable": true}'),
        ("look_at_obj_in_light-AppleSliced-None-Bed-1", '{"solvable": true}'),
    ):
        (tmp_path / "train" / name / "trial_0").mkdir(parents=True)
        (tmp_path / "train" / name / "trial_0" / "game.tw-pddl").write_text(content)
    row = {"id": "pick_heat_then_place_in_recep-Egg-None-Sink-2/trial_9", "task": "…", "pddl_problem": "…"}
    (tmp_path / "extra.jsonl").write_text(json.dumps(row))
    games = recipe.Games(seed=0, folder=tmp_path, heldout="extra")
    assert games.tasks_per_epoch == 3
    names = {games.train(index).data["game"] for index in range(3)}
    assert names == {f"train/pick_and_place_simple-Mug-None-Desk-1/trial_{n}/game.tw-pddl" for n in range(3)}
    assert games.heldout(0).data == {"game": row["id"]}
    assert (games.train(0).source, games.heldout(0).source) == (
        "pick_and_place_simple",
        "pick_heat_then_place_in_recep",
    )


async def test_missing_games_a_malformed_row_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"run.dataset.with.folder={tmp_path}"
    with pytest.raises(PluginError, match=r"no file .*train\.jsonl.*alfworld-download"):
        async with played("alfworld", folder, scratch=tmp_path, served={"AlfWorld": "127.0.0.1:1"}):
            pass
    (tmp_path / "train.jsonl").write_text('{"id": "a", "task": "b", "pddl_problem": "c"}\n{"id": "d"}')
    with pytest.raises(RecipeError, match=r"train\.jsonl:2: no 'task'"):
        recipe.Games(seed=0, folder=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        RecipeError, match=r"has 0 game\.tw-pddl below it, .*: pip install .* alfworld-download"
    ):
        recipe.Games(seed=0, folder=tmp_path, train="empty")
    with pytest.raises(RecipeError, match=r"train\.jsonl:2: no 'task'"):
        text_games._rows(tmp_path)
    with pytest.raises(RecipeError, match=r"no game\.tw-pddl and no JSON lines: .* alfworld-download"):
        text_games._rows(tmp_path / "empty")
    for package, game in (("alfworld", text_games.AlfWorld), ("textworld", text_games.TextWorld)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            RecipeError, match=rf"{package} is missing .* install 'astraflow\[environment,{package}\]'"
        ):
            game(games=tmp_path)


def walks(step: Callable[[Any, list[str]], str]) -> Callable[[str], str]:
    """A policy that sees the room as its prompt tells it."""
    visited: list[str] = []

    def act(prompt: str) -> str:
        said = step(_room(prompt), visited)
        if said.startswith("go"):
            visited.append(said.split()[2])
        return said

    return act


def _room(prompt: str) -> Any:
    """What somebody knows who has read everything so far."""
    words = prompt.split("Your task is to: put a ")[1].split()
    places = [part.split()[1] for part in prompt.split("You see ")[1].split(". Your task")[0].split(", ")]
    room = recipe.Room(places[:-1], {words[0]: "unknown"}, words[0], words[2])
    for place in places:
        if f"On the {place} 1, you see a {words[0]} 1" in prompt:
            room.lies[words[0]] = place
    if f"You pick up the {words[0]} 1" in prompt:
        room.lies[words[0]] = "hand"
    return room


async def test_who_looks_everywhere_in_turn_always_wins_and_who_stays_does_not(tmp_path: Path) -> None:
    async with played("alfworld/small.yaml", "raas.workflow.with.max_tokens=4096", scratch=tmp_path) as home:
        for index in range(20):
            task = home.dataset.heldout(index)
            assert task is not None
            won = await home.episode(task, agent=walks(recipe.expert))
            assert won.trajectories[0].reward == 1.0
            stays = walks(lambda room, _: f"go to {room.places[0]} 1")
            lost = await home.episode(task, agent=stays)
            assert (lost.trajectories[0].reward, lost.metrics["turns"]) == (0.0, 6.0)


def script() -> Iterator[tuple[str, str]]:
    """What is said to a room, and what it answers."""
    yield "take key 1 from desk 1", "Nothing happens."
    yield "go to bin 1", "On the bin 1, you see nothing."
    yield "go to moon 1", "Nothing happens."
    yield "go to desk 1", "On the desk 1, you see a key 1. You can take key 1 from desk 1."
    yield "move key 1 to desk 1", "Nothing happens."
    yield "take key 1 from bed 1", "Nothing happens."
    yield "take key 1 from desk 1", "You pick up the key 1 from the desk 1."
    yield "move key 1 to bin 1", "Nothing happens."
    yield "go to bin 1", "On the bin 1, you see nothing. You can move key 1 to bin 1."
    yield "move key 1 to bin 1", "You move the key 1 to the bin 1."


def test_a_room_does_what_is_possible_and_nothing_else() -> None:
    room = recipe.Room(("desk", "bed"), {"key": "desk", "pen": "bed"}, "key", "bin")
    assert room.intro == "You see a desk 1, a bed 1, a bin 1. Your task is to: put a key in bin 1."
    for said, seen in script():
        assert not room.is_done
        assert room.act(said) == seen
    assert room.is_done


def test_no_held_out_chore_is_trained_on_or_demonstrated() -> None:
    chores = recipe.Chores(seed=1)
    trained = {chores.train(index).data["problem"] for index in range(300)}
    held_out = {chores.heldout(index).data["problem"] for index in range(300)}
    assert (len(trained), len(held_out)) == (40, 14)
    where = {
        (thing, target, place) for thing, _, place, _, target in (problem.split() for problem in held_out)
    }
    assert not held_out & trained
    for each in islice(recipe.demonstrations(1), 2000):
        walked = "\n".join(message.content for message in each.messages)
        thing, target = walked.partition("put a ")[2].split()[0::2][:2]
        seen = re.search(rf"On the (\w+) 1, you see a {thing} 1", walked)
        assert seen is None or (thing, target, seen[1]) not in where
