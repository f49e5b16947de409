"""Dynamic sampling's filter."""

from dataclasses import replace

import pytest

from astraflow.recipe.advantage import AdvantageSettings, DrMas, Joint, Rae, Reinforce
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_dataflow.plugins.filters.drop_zero_advantage import DropZeroAdvantage
from support.groups import group


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 1.0], True), ([1.0, 1.0], False), ([0.5], False), ([0.1 + 0.2, 0.3], False)],
)
def test_groups_whose_rewards_are_all_equal_are_dropped(rewards: list[float], kept: bool) -> None:
    assert DropZeroAdvantage()(group(*rewards)) is kept


@pytest.mark.parametrize(
    ("advantage", "rewards", "kept"),
    [
        (Rae(), [1.0, 1.0], True),
        (Reinforce(), [1.0, 1.0], True),
        (Reinforce(), [0.0, 0.0], False),
        (DrMas(), [1.0], True),
        (DrMas(), [1.0, 1.0], False),
        (Joint(), [1.0, 1.0], True),
        (PluginSettings(use="recipe:LengthWeighted"), [1.0, 1.0], False),
    ],
)
def test_what_the_roles_advantage_would_use_is_kept(
    advantage: AdvantageSettings | PluginSettings, rewards: list[float], kept: bool
) -> None:
    assert DropZeroAdvantage({"player": advantage})(replace(group(*rewards), role="player")) is kept
