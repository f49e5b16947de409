"""Which keys of a recipe may change while its run goes on, and how the differences are shown."""

import pytest

from astraflow.errors import ConflictError
from astraflow.recipe_changes import plugin_changes, trainer_changes
from support.recipes import tiny_recipe


def _changes(*overrides: str) -> list[str]:
    return trainer_changes(tiny_recipe().recipe, tiny_recipe(*overrides).recipe)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.tokens_per_microbatch=4096",
        "trainer.gradient_sync=micro_batch",
        "trainer.checkpoint_every_steps=3",
        "trainer.keep_checkpoints=7",
        "trainer.algorithm.truncated=mask",
        "trainer.algorithm.kl={coefficient: 0.1}",
        "trainer.optimizer.beta1=0.5",
        "policies.solver.trainer={optimizer: {beta1: 0.5}}",
    ],
)
def test_what_only_the_trainer_reads_may_change(override: str) -> None:
    changes = _changes(override)
    assert changes
    section = override.partition("=")[0].partition("{")[0]
    assert all(change.startswith(section) and " → " in change for change in changes)


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=3",
        "run.steps=0",
        "dataflow.max_staleness=3",
        "policies.solver.sampling.temperature=0.5",
        "trainer.publish.max_behind=3",
        "trainer.algorithm.advantage=rloo",
        "trainer.optimizer.kind=muon",
        "trainer.optimizer.average={decay: 0.9}",
    ],
)
def test_what_others_read_too_is_refused_by_name(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConflictError, match=f"this may not change: {key}"):
        _changes(override, "trainer.optimizer.beta1=0.5")


def test_equal_recipes_and_other_numbers_of_steps_are_no_change() -> None:
    assert _changes() == _changes("run.steps=9") == _changes("policies.solver.steps=9") == []


@pytest.mark.parametrize(
    "override",
    ["dataflow.filters=[recipe:Filter]", "policies.solver.dataflow={batch_needs: {min_sources: 2}}"],
)
def test_plugins_of_the_data_path_may_change(override: str) -> None:
    old, new = tiny_recipe().recipe, tiny_recipe(override).recipe
    assert plugin_changes(old, old) == []
    assert plugin_changes(old, new)
    with pytest.raises(
        ConflictError, match=r"but for curators, filters, .* may not change: run\.steps: 100 → 5"
    ):
        plugin_changes(old, tiny_recipe(override, "run.steps=5").recipe)
