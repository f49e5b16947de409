"""TextCraft's data: a folder `recipes` of crafting recipes, one JSON file each, as the game's assets hold them.

Invariant: what comes out has one recipe an item and no cycle, whatever order the files are found in. Read by `Goals` on
dataflow servers; the files belong to the game's maker, and nothing of them is here.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.errors import RecipeError

BRING = (
    "TextCraft reads the game's own files; unpack data/minecraft/recipes of your copy of the game (a jar is a zip "
    "file), and give the folder that holds `recipes`: --set run.dataset.with.folder=FOLDER"
)


@dataclass(frozen=True, kw_only=True)
class CraftingRecipe:
    """What makes `makes` of `item`; needs are items, and tags (`#planks`) until they are resolved."""

    item: str
    group: str
    needs: Mapping[str, int]
    makes: int


def read_recipes(folder: Path) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return what each item is made of, and how many at once. Of an item's recipes the first file counts, of a tag's
    items the first by name; a recipe of one block and one that closes a circle are left out. Raises RecipeError.
    """
    files = sorted((folder / "recipes").glob("*.json"))
    if not files:
        raise RecipeError(f"{folder.absolute()} has no recipes/*.json: {BRING}")
    found = [recipe for file in files for recipe in _read(file)]
    tagged = {f"#{each.group}": each.item for each in sorted(found, key=lambda each: each.item, reverse=True)}
    needs, makes = dict[str, dict[str, int]](), dict[str, int]()
    for each in found:
        resolved = Counter[str]()
        for name, number in each.needs.items():
            resolved[tagged.get(name, name.removeprefix("#"))] += number
        is_unpacking = len(resolved) == 1 and next(iter(resolved)).endswith("_block")
        if each.item not in needs and not is_unpacking and each.item not in _below(resolved, needs):
            needs[each.item], makes[each.item] = dict(resolved), each.makes
    return needs, makes


def closure(goal: str, needs: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The recipes that lead to an item, its own first."""
    return {item: dict(needs[item]) for item in _below({goal: 1}, needs) if item in needs}


def level(item: str, needs: Mapping[str, Mapping[str, int]]) -> int:
    """How many crafts one after the other an item takes; 0 for what is basic."""
    return 1 + max(level(each, needs) for each in needs[item]) if item in needs else 0


def _below(items: Mapping[str, int], needs: Mapping[str, Mapping[str, int]]) -> dict[str, None]:
    """`items` and all that they are made of, in order."""
    seen, waiting = dict[str, None](), list(items)
    while waiting:
        item = waiting.pop(0)
        if item not in seen:
            seen[item] = None
            waiting += needs.get(item, ())
    return seen


def _read(file: Path) -> Iterator[CraftingRecipe]:
    """The recipe of a file; none where it is for a furnace, or another kind of work."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise RecipeError(f"{file}:{line}: not JSON ({error}); a recipe is one JSON object") from error
    try:
        kind = _bare(given["type"])
        if kind in ("crafting_shaped", "crafting_shapeless"):
            yield _recipe(given, is_shaped=kind == "crafting_shaped")
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{file}:1: no recipe of TextCraft's form ({type(error).__name__}: {error}); it has type, result, and "
            "pattern with key, or ingredients"
        ) from error


def _recipe(given: Mapping[str, Any], *, is_shaped: bool) -> CraftingRecipe:
    needs = Counter[str]()
    if is_shaped:
        drawn = Counter("".join(given["pattern"]))
        for key, ingredient in given["key"].items():
            needs[_named(ingredient)] += drawn[key]
    else:
        needs.update(map(_named, given["ingredients"]))
    if not needs or min(needs.values()) < 1:
        raise ValueError(f"it needs {dict(needs)}")
    result = given["result"]
    item = result if isinstance(result, str) else result["item"]
    makes = 1 if isinstance(result, str) else int(result.get("count", 1))
    return CraftingRecipe(item=_bare(item), group=given.get("group", _bare(item)), needs=needs, makes=makes)


def _named(ingredient: Any) -> str:  # noqa: ANN401 - of JSON
    """The first of several that would do; a tag has a `#` before it."""
    first = ingredient[0] if isinstance(ingredient, list) else ingredient
    return _bare(first["item"]) if "item" in first else f"#{_bare(first['tag'])}"


def _bare(name: str) -> str:
    return name.removeprefix("minecraft:")
