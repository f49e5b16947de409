"""The documented loss and advantage do what their pages say, and broken ones are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow import errors, plugins
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow.recipe.file import parse_recipe
from astraflow_kit.plugins import RecipeSource
from astraflow_trainer.step.plugins import PluginAdvantage, PluginLoss, StepPlugins
from support.docs_code import code_of, recipe_folder
from support.scripted_dataflow import RECIPE

LOSS, ADVANTAGE = "plugins/loss.md", "plugins/advantage.md"


def documented(folder: Path, page: str) -> StepPlugins:
    """What a page's recipe names, made as a trainer makes it."""
    text = RECIPE + code_of(page, language="yaml")
    algorithm = parse_recipe(text).recipe.policy("solver").trainer.algorithm
    return StepPlugins.made(algorithm, source=RecipeSource(text=text, folder=recipe_folder(folder, page)))


def _tokens(logprob: list[float], advantage: list[float], row: list[int]) -> plugins.TrainedTokens:
    anchor = torch.full((len(row),), -1.0)
    return plugins.TrainedTokens(
        logprob=torch.tensor(logprob, requires_grad=True),
        anchor_logprob=anchor,
        behavior_logprob=anchor,
        advantage=torch.tensor(advantage),
        row=torch.tensor(row),
        num_rows=3,
    )


def test_the_documented_loss_drops_rows_that_were_pushed_away(tmp_path: Path) -> None:
    loss = documented(tmp_path, LOSS).loss
    assert loss is not None
    assert loss.name == "recipe:OffPolicyMask"
    # Row 0 drifted by 0.5 on average, row 2 by 0.1; the limit of the page is 0.3.
    tokens = _tokens([-1.9, -1.1, -1.1], [-2.0, -2.0, -2.0], [0, 0, 2])
    assert loss.of(tokens).tolist() == pytest.approx([0.0, 0.0, 2.0 * float(np.exp(-0.1))])


def test_the_documented_advantage_is_zero_on_length_weighted_average(tmp_path: Path) -> None:
    advantage = documented(tmp_path, ADVANTAGE).advantage
    assert advantage is not None
    rewards = np.array([1.0, 0.0, 0.1, 0.1, 0.1])
    values = advantage.of(rewards, groups=[7, 7, 8, 8, 8], lengths=[1, 3, 2, 3, 4])
    assert values.tolist() == [2 * 0.75, -2 * 0.25, 0.0, 0.0, 0.0]


def test_an_algorithm_of_ours_needs_no_plug_in() -> None:
    assert StepPlugins.made(AlgorithmSettings(), source=RecipeSource()) == StepPlugins()


def test_a_wrong_setting_is_refused_with_its_line(tmp_path: Path) -> None:
    text = RECIPE + code_of(LOSS, language="yaml").replace("max_drift", "max_drfit")
    algorithm = parse_recipe(text).recipe.policy("solver").trainer.algorithm
    source = RecipeSource(name="recipe.yaml", text=text, folder=recipe_folder(tmp_path, LOSS))
    line = text.splitlines().index('    loss: { use: "recipe:OffPolicyMask", with: { max_drfit: 0.3 } }') + 1
    with pytest.raises(errors.PluginError, match=rf"recipe.yaml:{line}: .*max_drfit.*max_drift"):
        StepPlugins.made(algorithm, source=source)


def _raises(_argument: object) -> Any:
    raise KeyError("answer")


BROKEN_LOSSES = [
    (_raises, r"raised KeyError: 'answer' \(test_plugins.py:\d+ in _raises\)"),
    (lambda tokens: tokens.logprob.mean(), r"must return float32\[2\].* it has shape \(\)"),
    (lambda tokens: -tokens.advantage, "it has no gradient"),
    (lambda _tokens: 1.0, "it has float"),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN_LOSSES)
def test_a_broken_loss_is_named(broken: plugins.Loss, words: str) -> None:
    with pytest.raises(errors.PluginError, match=f"loss plug-in 'recipe:Broken' .*{words}"):
        PluginLoss("recipe:Broken", broken).of(_tokens([-1.0, -1.0], [1.0, 1.0], [0, 0]))


BROKEN_ADVANTAGES = [
    (_raises, r"raised KeyError: 'answer' \(test_plugins.py:\d+ in _raises\)"),
    (lambda rows: rows.rewards[:1], r"must return 2 finite numbers.* it has shape \(1,\)"),
    (lambda rows: [float("nan")] * len(rows.rewards), "2 of them not finite"),
    (lambda _rows: "high", "raised ValueError"),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN_ADVANTAGES)
def test_a_broken_advantage_is_named(broken: Callable[[plugins.RewardedRows], Any], words: str) -> None:
    advantage: plugins.Advantage = broken
    with pytest.raises(errors.PluginError, match=f"advantage plug-in 'recipe:Broken' .*{words}"):
        PluginAdvantage("recipe:Broken", advantage).of(np.array([0.0, 1.0]), groups=[0, 0], lengths=[1, 1])
