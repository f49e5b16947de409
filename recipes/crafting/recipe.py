"""A graph of crafting recipes, generated or TextCraft's: goals, an expert, and demonstrations of which half rush.

Invariant: a goal belongs to one split for ever. The dataflow server reads `Goals`, nodes run `Crafting`, the warm start
of the small size reads `demonstrations`.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from zlib import crc32

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.errors import RecipeError
from astraflow.plugins import Demonstration, Message, TaskSpec

from .agents import ACTION, Crafting, World  # noqa: TID252 - files beside this one, which travel with it
from .textcraft import closure, level, read_recipes  # noqa: TID252

__all__ = ["Crafting", "Goals", "demonstrations"]

NAMES = [first + last for first in ("ba", "de", "fi", "go", "ku", "la") for last in "kmnprstz"]
LEVELS, WIDTH, SMALL_WIDTH = 4, 12, 4
"""Levels, and items of a level, in the large graph and in a small one; those of the first level are basic."""


class Goals(GeneratedTasks):
    """Endless goals that take up to `levels` crafts one after the other; called by the dataflow server."""

    def __init__(
        self, *, seed: int, levels: int = 3, folder: Path | None = None, small: bool = False
    ) -> None:
        """`folder` holds TextCraft's `recipes`, of which goals take two crafts at least; else they are generated: one
        graph for all tasks, or small ones, another for each task, so that none can be learned by heart.
        """
        super().__init__(seed=seed)
        self._small_levels = levels if small else 0
        self._recipes, self._makes = read_recipes(folder) if folder else (RECIPES, {})
        lowest = 2 if folder else 1
        found = [item for item in self._recipes if lowest <= level(item, self._recipes) <= levels]
        self._goals = {held_out: _split(found, held_out=held_out) for held_out in (False, True)}
        if not all(self._goals.values()):
            raise RecipeError(
                f"{folder} has {len(found)} items of {lowest} to {levels} crafts; two are the least, one held out"
            )

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """A goal; one that is held out, in a small graph with what it is made of, is that of no training task."""
        if self._small_levels:
            goal, recipes = small_goal(rng, levels=self._small_levels, held_out=held_out)
            return TaskSpec(task_id, (), {"goal": goal, "recipes": recipes, "problem": goal})
        goal = rng.choice(self._goals[held_out])
        recipes = closure(goal, self._recipes)
        makes = {item: self._makes[item] for item in recipes if self._makes.get(item, 1) > 1}
        return TaskSpec(task_id, (), {"goal": goal, "recipes": recipes, "makes": makes, "problem": goal})


def _split(items: Sequence[str], *, held_out: bool) -> list[str]:
    """Every fifth item is held out."""
    return [item for place, item in enumerate(items) if (place % 5 == 0) is held_out]


def drawn_graph(rng: random.Random, *, width: int) -> dict[str, dict[str, int]]:
    """What each item is made of: one of the level below, and one or two that are basic. Lowest level first."""
    graph = {}
    for place in range(width, LEVELS * width):
        below = width * (place // width - 1)
        needs = {rng.choice(NAMES[below : below + width]): 1, rng.choice(NAMES[:width]): rng.randint(1, 2)}
        graph[NAMES[place]] = needs
    return graph


def small_goal(rng: random.Random, *, levels: int, held_out: bool) -> tuple[str, dict[str, dict[str, int]]]:
    """A goal of a graph drawn anew, and what it is made of; a fifth of all such pairs is held out."""
    while True:
        graph = drawn_graph(rng, width=SMALL_WIDTH)
        goal = rng.choice(list(graph)[: SMALL_WIDTH * levels])
        recipes = closure(goal, graph)
        if (crc32(repr(recipes).encode()) % 5 == 0) is held_out:
            return goal, recipes


RECIPES = drawn_graph(random.Random("recipes"), width=WIDTH)


def expert(world: World, number: int, goal: str, *, has_asked: bool) -> str:
    """What somebody who knows how does next; with spaces around names, so that a name is one token wherever it is."""
    if world.held[goal] >= number:
        return "<finish> made </finish>"
    if not has_asked:
        return f"<info> {goal} </info>"
    for item, needed in world.needs(number - world.held[goal], goal)[0].items():
        if (lacking := needed - world.held[item]) > 0:
            kind = "spawn" if item in world.recipes else "get"
            return f"<{kind}> {lacking} {item} </{kind}>"
    return f"<craft> {number} {goal} </craft>"


TURNS = (0, 1, 1, 2, 2, 3, 4)
"""Which turns are shown: most often those that bring what an item is made of, whose names are copied from an answer."""


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """One turn each, of goals of two levels: two in three as the expert, one in a rush, which ends or crafts early."""
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        goal, recipes = small_goal(rng, levels=2, held_out=False)
        number, world = rng.randint(1, 2), World(recipes)
        chat = [Message("user", f"Make {number} {goal}.")]
        for turn in range(rng.choice(TURNS)):
            said = expert(world, number, goal, has_asked=turn > 0)
            ((kind, text),) = ACTION.findall(said)
            if kind == "finish":
                break
            if kind == "spawn":
                world.held[text.split()[1]] += int(text.split()[0])
            seen = "made" if kind == "spawn" else world.do(kind, text)
            chat += [Message("assistant", said), Message("user", seen)]
        rush = rng.choice(("<finish> made </finish>", f"<craft> {number} {goal} </craft>"))
        yield Demonstration(
            tuple(chat), expert(world, number, goal, has_asked=len(chat) > 1) if index % 3 else rush
        )
