"""Trees of agents on the generated graph: an expert makes every goal, each agent earns by its own."""

import json
import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import pytest

from astraflow.errors import RecipeError
from astraflow.plugins import TaskSpec
from astraflow_raas.engine.base import EngineRefused
from support.recipes import PlayedRecipe, played, recipe_code

recipe = recipe_code("crafting")


def expert(
    recipes: Mapping[str, Mapping[str, int]] = recipe.RECIPES, makes: Mapping[str, int] | None = None
) -> Callable[[str], str]:
    """A policy that plays all agents by what each of them sees; the inventory it keeps by itself."""
    world = recipe.World(recipes, makes=makes or {})

    def act(prompt: str) -> str:
        number, goal = re.findall(r"Make (\d+) (\w+)\.", prompt)[-1]
        said: str = recipe.expert(world, int(number), goal, has_asked="<info>" in prompt.rpartition(".¶")[2])
        ((kind, text),) = recipe.ACTION.findall(said)
        if kind in ("get", "craft"):
            world.do(kind, text)
        return said

    return act


async def earned(
    crafting: PlayedRecipe, task: TaskSpec, answer: Callable[[str], str]
) -> tuple[list[float], float]:
    episode = await crafting.episode(task, crafter=answer)
    assert {each.policy for each in episode.trajectories} == {"crafter"}
    assert len(episode.trajectories) == episode.metrics["turns"]
    return [each.reward for each in episode.trajectories], episode.metrics["agents"]


async def test_the_expert_makes_goals_of_every_level_with_an_agent_for_each(tmp_path: Path) -> None:
    async with played("crafting", scratch=tmp_path) as crafting:
        tasks = [crafting.dataset.heldout(index) for index in range(30)]
        levels = {}
        for task in tasks:
            assert task is not None
            rewards, agents = await earned(crafting, task, expert())
            assert set(rewards) == {1.0}
            levels[recipe.NAMES.index(task.data["goal"]) // recipe.WIDTH] = agents
        assert levels == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize(
    ("child", "parents", "childs"), [("<finish>made</finish>", 0.0, 0.0), ("", 0.0, 1.0)]
)
async def test_an_agent_earns_by_its_own_goal_and_not_by_its_parent_s(
    child: str, parents: float, childs: float, tmp_path: Path
) -> None:
    async with played("crafting/small.yaml", scratch=tmp_path) as crafting:
        task = next(
            task
            for task in map(crafting.dataset.train, range(100))
            if task is not None and recipe.NAMES.index(task.data["goal"]) >= 2 * recipe.SMALL_WIDTH
        )
        works = expert(task.data["recipes"])

        def answer(prompt: str) -> str:
            goal = re.findall(r"Make \d+ (\w+)\.", prompt)[-1]
            if goal != task.data["goal"]:
                return child or works(prompt)
            made = f"<spawn>1\n  {next(iter(task.data['recipes'][goal]))}</spawn>"
            return "<finish>done</finish>" if "made" in prompt.rpartition(".¶")[2] else made

        episode = await crafting.episode(task, crafter=answer)
        by_depth = {each.metrics["depth"]: each.reward for each in episode.trajectories}
        assert by_depth == {0.0: parents, 1.0: childs}


@pytest.mark.parametrize(
    "said",
    ["", "<craft>1 nothing</craft>", "<spawn>many</spawn>", "<spawn>0 bak</spawn>", "<get>9999 bak</get>"],
)
async def test_who_never_finishes_earns_nothing_and_stops_with_the_budget(said: str, tmp_path: Path) -> None:
    async with played("crafting/small.yaml", "raas.workflow.with.max_steps=5", scratch=tmp_path) as crafting:
        task = crafting.dataset.train(0)
        assert task is not None
        assert await earned(crafting, task, lambda _: said) == ([0.0] * 5, 1.0)


async def test_an_agent_whose_chat_outgrows_the_engine_ends_and_its_turns_count(tmp_path: Path) -> None:
    async with played("crafting/small.yaml", scratch=tmp_path) as crafting:
        task = crafting.dataset.train(0)
        assert task is not None

        def answer(prompt: str) -> str:
            if prompt.count("<assistant>") > room:
                raise EngineRefused("the prompt is longer than the context")
            return "<inventory></inventory>"

        room = 3
        assert await earned(crafting, task, answer) == ([0.0] * 3, 1.0)
        room = 0
        with pytest.raises(EngineRefused):
            await earned(crafting, task, answer)


def test_actions_tell_what_is_possible() -> None:
    world = recipe.World({"tool": {"wood": 2, "rope": 1}, "rope": {"hemp": 3}})
    script = [
        (("info", "tool"), "2 wood basic, 1 rope"),
        (("info", "wood"), "basic"),
        (("get", "1 rope"), "rope is not basic"),
        (("get", "5 gold"), "gold is not basic"),
        (("craft", "1 rope"), "cannot craft rope"),
        (("get", "6 hemp"), "got 6 hemp"),
        (("craft", "2 rope"), "made 2 rope"),
        (("craft", "tool"), "say N ITEM"),
        (("inventory", ""), "2 rope"),
    ]
    for (kind, text), seen in script:
        assert world.do(kind, text) == seen


PLANKS = {
    "type": "minecraft:crafting_shapeless",
    "group": "boards",
    "ingredients": [{"item": "minecraft:trunk"}],
    "result": {"item": "minecraft:fir_board", "count": 4},
}
TEXTCRAFT: dict[str, object] = {
    "fir_board": PLANKS,
    "elm_board": PLANKS | {"result": {"item": "minecraft:elm_board", "count": 2}},
    "rod": {
        "type": "minecraft:crafting_shaped",
        "pattern": ["#", "#"],
        "key": {"#": {"tag": "minecraft:boards"}},
        "result": {"item": "minecraft:rod", "count": 4},
    },
    "hoe": {
        "type": "minecraft:crafting_shaped",
        "pattern": ["XX", " #", " #"],
        "key": {
            "#": {"item": "minecraft:rod"},
            "X": [{"tag": "minecraft:pebbles"}, {"item": "minecraft:flint"}],
        },
        "result": "minecraft:hoe",
    },
    # Left out: not a craft, an item's second recipe, one block unpacked, and one that would close a circle.
    "brick": {
        "type": "minecraft:smelting",
        "ingredient": {"item": "minecraft:clay"},
        "result": "minecraft:brick",
    },
    "rod_again": {
        "type": "minecraft:crafting_shapeless",
        "ingredients": [{"item": "minecraft:reed"}],
        "result": {"item": "minecraft:rod"},
    },
    "flint": {
        "type": "minecraft:crafting_shapeless",
        "ingredients": [{"item": "minecraft:flint_block"}],
        "result": {"item": "minecraft:flint", "count": 9},
    },
    "trunk": {
        "type": "minecraft:crafting_shapeless",
        "ingredients": [{"item": "minecraft:rod"}, {"item": "minecraft:rod"}],
        "result": {"item": "minecraft:trunk"},
    },
}
"""Recipes of ours in the layout of the game's; names of files decide which comes first."""


def textcraft(folder: Path, **files: object) -> Path:
    (folder / "recipes").mkdir(exist_ok=True)
    for name, content in (TEXTCRAFT | files).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "recipes" / f"{name}.json").write_text(text)
    return folder


async def test_a_textcraft_folder_is_read_and_its_goals_are_made(tmp_path: Path) -> None:
    needs, makes = recipe.read_recipes(textcraft(tmp_path))
    assert needs == {
        "elm_board": {"trunk": 1},
        "fir_board": {"trunk": 1},
        "rod": {"elm_board": 2},
        "hoe": {"rod": 2, "pebbles": 2},
    }
    assert makes == {"elm_board": 2, "fir_board": 4, "rod": 4, "hoe": 1}
    folder = f"run.dataset.with.folder={tmp_path}"
    async with played("crafting", folder, scratch=tmp_path / "run") as crafting:
        tasks = [crafting.dataset.train(0), crafting.dataset.heldout(0)]
        assert {task.data["goal"] for task in tasks if task is not None} == {"rod", "hoe"}
        for task in tasks:
            assert task is not None
            rewards, _ = await earned(crafting, task, expert(task.data["recipes"], task.data["makes"]))
            assert set(rewards) == {1.0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{\n"type": }', r"odd\.json:2: not JSON"),
        ({"pattern": []}, r"odd\.json:1: no recipe of TextCraft's form \(KeyError: 'type'\)"),
        ({"type": "crafting_shapeless", "ingredients": [], "result": "x"}, r"ValueError: it needs \{\}"),
        ({"type": "crafting_shapeless", "ingredients": [{}], "result": "x"}, r"KeyError: 'tag'"),
        ({"type": "crafting_shaped", "pattern": ["A"], "key": {"B": {"item": "y"}}, "result": "x"}, "'y': 0"),
        ([], r"odd\.json:1: no recipe of TextCraft's form \(TypeError"),
    ],
)
def test_a_malformed_recipe_is_named(content: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe.Goals(seed=0, folder=textcraft(tmp_path, odd=content))


def test_a_folder_without_recipes_says_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no recipes/\*\.json: TextCraft reads the game's own files"):
        recipe.Goals(seed=0, folder=tmp_path)
    with pytest.raises(RecipeError, match="has 1 items of 2 to 2 crafts; two are the least"):
        recipe.Goals(seed=0, folder=textcraft(tmp_path), levels=2)


def test_no_held_out_goal_is_trained_on() -> None:
    data = recipe.Goals(seed=1)
    trained = {data.train(index).data["goal"] for index in range(300)}
    held_out = {data.heldout(index).data["goal"] for index in range(300)}
    assert not held_out & trained
    assert len(held_out) == 8


def test_small_tasks_have_graphs_of_their_own() -> None:
    """So nothing can be learned by heart, and no held-out task is trained on or demonstrated."""
    data = recipe.Goals(seed=1, levels=2, small=True)
    made = {str(data.heldout(index).data["recipes"]) for index in range(200)}
    assert len(made) > 100
    assert not made & {str(data.train(index).data["recipes"]) for index in range(3000)}
    told = {
        tuple(message.content for message in each.messages[:3])
        for each in islice(recipe.demonstrations(1), 4000)
    }
    for index in range(200):
        task = data.heldout(index).data
        if len(task["recipes"]) == 1:  # its first answer is all there is to know
            said = recipe.World(task["recipes"]).do("info", task["goal"])
            asked = f"<info> {task['goal']} </info>"
            assert not told & {(f"Make {number} {task['goal']}.", asked, said) for number in (1, 2)}
    for index in range(50):
        task = data.heldout(index)
        basics = {need for needs in task.data["recipes"].values() for need in needs} - {*task.data["recipes"]}
        assert basics <= {*recipe.NAMES[: recipe.SMALL_WIDTH]}
        assert recipe.level(task.data["goal"], task.data["recipes"]) <= 2


def test_two_in_three_demonstrations_are_an_expert_s() -> None:
    """The others end or craft at once; so does an expert, where it is time."""
    shown = [(len(each.messages), each.completion) for each in islice(recipe.demonstrations(1), 4000)]
    at_once = [said for length, said in shown if length == 1]
    rushed = sum(not said.startswith("<info>") for said in at_once)
    assert rushed / len(at_once) == pytest.approx(1 / 3, abs=0.08)
