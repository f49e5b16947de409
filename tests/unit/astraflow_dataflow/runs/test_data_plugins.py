"""Making the data plug-ins of a recipe."""

import re
from collections.abc import Sequence

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import Group, TaskSpec
from astraflow.recipe.file import parse_recipe
from astraflow.recipe.plugin_settings import DataPluginSettings
from astraflow_dataflow.runs.data_plugins import DataPlugins, plugin_names
from astraflow_kit.plugins import RecipeSource
from support.dataflow_world import Counting, recipe_text
from support.groups import group


def at_least(group: Group, *, reward: float = 0.0) -> bool:
    """A filter that is a function."""
    return min(group.rewards) >= reward


def made(**flow: str) -> DataPlugins:
    """The plug-ins of a recipe with these settings."""
    text = recipe_text(**flow)  # type: ignore[arg-type]
    return DataPlugins.make(parse_recipe(text).recipe, RecipeSource(text=text))


def test_a_plugin_named_twice_has_two_names_and_two_states() -> None:
    curators = made(curators='["support.data_plugins:SkipSeen", "support.data_plugins:SkipSeen"]').curators
    names = [plugin.state_name for plugin in curators]
    assert names == ["curator support.data_plugins:SkipSeen", "curator support.data_plugins:SkipSeen#2"]
    assert curators[0].state is curators[0].made.state is not curators[1].state  # type: ignore[attr-defined]


def test_only_a_plugin_that_asks_for_a_state_has_one() -> None:
    filters = f'["support.data_plugins:EveryOther", {{use: "{__name__}:at_least", with: {{reward: 0.5}}}}]'
    stateful, function = made(filters=filters).filters
    assert stateful.state is not None
    assert function.state is None
    assert (function.made(group(0.7)), function.made(group(0.2))) == (True, False)
    assert made(selector='"support.data_plugins:LastFirst"').selector.state is None  # type: ignore[union-attr]


class Epochs(Counting):
    """A data set that says how long its epochs are."""

    tasks_per_epoch = 7


class Asks:
    """A curator that is told."""

    def __init__(self, tasks_per_epoch: int | None) -> None:
        self.told = tasks_per_epoch

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """All."""
        return tasks

    def observe(self, group: Group) -> None:
        """Learns nothing."""


@pytest.mark.parametrize(("dataset", "told"), [(f"{__name__}:Epochs", 7), ("Counting", None)])
def test_plugins_may_ask_how_long_an_epoch_of_the_data_set_is(dataset: str, told: int | None) -> None:
    (curator,) = made(curators=f'["{__name__}:Asks"]', dataset=dataset).curators
    assert curator.made.told == told  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        ({"curators": '["support.data_plugins:EveryOther"]'}, ("is not a Curator", "define `def observe(")),
        ({"selector": '"support.data_plugins:SkipAll"'}, ("is not a Selector", "define `def select(")),
        (
            {"selector": '{use: "support.data_plugins:LastFirst", with: {at_most: 3}}'},
            ("at_most", "at_least"),
        ),
    ],
)
def test_what_cannot_be_made_says_where_and_why(flow: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(PluginError) as refused:
        made(**flow)
    assert [word for word in (*words, "dataflow") if word not in refused.value.message] == []


def test_a_switch_keeps_what_has_the_same_settings_under_its_name() -> None:
    def use(**settings: int) -> DataPluginSettings:
        return DataPluginSettings.model_validate({"use": "m:A", "with": settings})

    first = [use(x=1), use(x=2)]
    assert plugin_names(first, first=first) == ["m:A", "m:A#2"]
    # In another order, beside one of other settings, as a shadow.
    shadow = DataPluginSettings.model_validate({"use": "m:A", "with": {"x": 1}, "shadow": True})
    found = plugin_names([use(x=2), use(x=3), shadow, use(x=3)], first=first)
    assert (found[0], found[2]) == ("m:A#2", "m:A")
    assert re.fullmatch(r"m:A~[0-9a-f]{8}", found[1])
    assert found[3] == f"{found[1]}#2"


def test_a_switch_goes_on_with_the_plugins_that_stay() -> None:
    before = made(filters='["support.data_plugins:EveryOther"]')
    text = recipe_text(filters='[{use: "support.data_plugins:EveryOther", shadow: true}]', curators="[]")
    after = DataPlugins.make(parse_recipe(text).recipe, RecipeSource(text=text), before=before)
    assert after.filters[0].made is before.filters[0].made
    assert after.filters[0].state is before.filters[0].state
    assert (after.filters[0].shadow, after.dataset) == (True, before.dataset)
    assert after.unobserved is before.unobserved
