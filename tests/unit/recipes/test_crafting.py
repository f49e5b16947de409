"""Trees of agents on the generated graph: an expert makes every goal, each agent earns by its own."""

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from astraflow.plugins import TaskSpec
from support.recipes import PlayedRecipe, played, recipe_code

recipe = recipe_code("crafting")


def expert() -> Callable[[str], str]:
    """A policy that plays all agents by what each of them sees; the inventory it keeps by itself."""
    world = recipe.World(recipe.RECIPES)

    def act(prompt: str) -> str:
        number, goal = re.findall(r"Make (\d+) (\w+)\.", prompt)[-1]
        said = recipe.expert(world, int(number), goal, has_asked="<info>" in prompt.rpartition(".¶")[2])
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
            if task is not None and recipe.NAMES.index(task.data["goal"]) >= 2 * recipe.WIDTH
        )
        works = expert()

        def answer(prompt: str) -> str:
            goal = re.findall(r"Make \d+ (\w+)\.", prompt)[-1]
            if goal != task.data["goal"]:
                return child or works(prompt)
            made = f"<spawn>1 {next(iter(task.data['recipes'][goal]))}</spawn>"
            return "<finish>done</finish>" if "made" in prompt.rpartition(".¶")[2] else made

        episode = await crafting.episode(task, crafter=answer)
        by_depth = {each.metrics["depth"]: each.reward for each in episode.trajectories}
        assert by_depth == {0.0: parents, 1.0: childs}


@pytest.mark.parametrize(
    "said", ["", "<craft>1 nothing</craft>", "<spawn>many</spawn>", "<get>9999 bak</get>"]
)
async def test_who_never_finishes_earns_nothing_and_stops_with_the_budget(said: str, tmp_path: Path) -> None:
    async with played("crafting/small.yaml", "raas.workflow.with.max_steps=5", scratch=tmp_path) as crafting:
        task = crafting.dataset.train(0)
        assert task is not None
        assert await earned(crafting, task, lambda _: said) == ([0.0] * 5, 1.0)


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


def test_no_held_out_goal_is_trained_on_or_demonstrated() -> None:
    data = recipe.Goals(seed=1)
    trained = {data.train(index).data["goal"] for index in range(300)}
    held_out = {data.heldout(index).data["goal"] for index in range(300)}
    shown = {each.messages[0].content.split()[-1] for each in islice(recipe.demonstrations(1), 500)}
    assert not held_out & (trained | {goal.rstrip(".") for goal in shown})
    assert len(held_out) == 8
