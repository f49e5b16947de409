"""A recipe that names everything a recipe must, for tests that only need one to exist."""

from astraflow.recipe.file import LoadedRecipe, parse_recipe

TINY = """
run: {name: tiny, dataset: "recipe:Data"}
policies: {solver: {model: {path: some/model}}}
raas: {reward: "recipe:Reward"}
"""


def tiny_recipe(*overrides: str) -> LoadedRecipe:
    """The recipe with some of its keys replaced."""
    return parse_recipe(TINY, overrides=overrides)
