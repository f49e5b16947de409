"""Every study is cells, and every cell a recipe that is valid."""

import pytest

from astraflow.recipe.file import load_recipe
from astraflow.recipe.shipped import shipped_recipes
from astraflow_bench.studies.catalogue import studies
from astraflow_bench.studies.study import Run, heldout_curve
from astraflow_launcher.support.recipe_trial import try_recipe
from support.study_results import evaluations


@pytest.mark.parametrize("name", studies())
def test_every_arm_is_a_valid_recipe(name: str) -> None:
    found = studies()[name]
    cells = found.cells(seeds=1)
    assert [cell.arm for cell in cells] == [arm.name for arm in found.arms]
    recipes = [cell.resolved() for cell in cells]
    assert len(set(recipes)) == len(recipes)


@pytest.mark.parametrize(("name", "place"), [(name, place) for name in studies() for place in (0, -1)])
def test_daemons_can_make_what_an_arm_names(name: str, place: int) -> None:
    cell = studies()[name].cells(seeds=1)[place]
    said = "; ".join(try_recipe(load_recipe(cell.path, overrides=cell.overrides)))
    assert "data set: task train-0" in said
    assert "reward: 0 for task train-0" in said or name == "recipes", "environments reward by themselves"


def test_cells_go_seed_by_seed_and_controls_may_have_fewer() -> None:
    cells = studies()["quickstart"].cells(seeds=2, steps=3, overrides=["dataflow.group_size=4"])
    assert [cell.name for cell in cells] == ["recipe, seed 0", "control, seed 0", "recipe, seed 1"]
    assert cells[2].overrides == ("dataflow.group_size=4", "run.steps=3", "run.seed=1")


def test_arms_are_chosen_by_name_or_pattern() -> None:
    found = studies()["async"]
    chosen = found.cells(seeds=1, only=["*-4", "async-10"])
    assert [cell.arm for cell in chosen] == ["phase-4", "batch-4", "ahead-4", "async-4", "async-10"]
    with pytest.raises(ValueError, match=r"async-5 is no arm of async; it has phase-4, batch-4"):
        found.cells(seeds=1, only=["async-5"])


def test_each_small_size_has_an_arm_and_a_control_that_differs_in_the_learning_rate() -> None:
    found = studies()["recipes"]
    arms = {arm.name: arm.recipe for arm in found.arms}
    assert arms["math"] == arms["math control"] == "math/small.yaml"
    assert arms["quickstart"] == "quickstart/recipe.yaml"
    assert arms["code-multi-agent-testgen"] == "code-multi-agent/small-testgen.yaml"
    assert {file.split("/")[0] for file in arms.values()} == set(shipped_recipes())
    chosen = found.cells(seeds=1, only=["math"])
    assert [cell.arm for cell in chosen] == ["math", "math control"]
    assert "learning_rate: 0.0\n" in chosen[1].resolved()


def test_a_recording_replaces_the_tails_and_stands_in_the_recipe() -> None:
    cells = studies([3, 9, 27])["async"].cells(seeds=1)
    assert [cell.arm for cell in cells] == ["phase-replay", "batch-replay", "ahead-replay", "async-replay"]
    assert "lengths:" in cells[0].resolved()


def test_of_two_evaluations_of_a_version_the_final_one_counts_and_an_empty_one_does_not() -> None:
    lines = evaluations((0, 0.2), (5, None), (9, 0.7), (9, 0.8))
    assert heldout_curve(Run(summary={}, metrics=lines, events=[])) == [(0, 0.2), (9, 0.8)]
