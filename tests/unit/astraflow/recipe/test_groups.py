"""Routes and needs that cannot be meant are refused, with the reason."""

import pytest

from astraflow.errors import RecipeError
from astraflow.recipe.file import parse_recipe
from support.recipes import tiny_recipe


def test_routes_are_read_and_written_back_as_they_were() -> None:
    when = "{sources: [gsm8k], before: 2026-11-30T12:00:00Z, max_reward: 0.5}"
    loaded = tiny_recipe(f"dataflow.routes=[{{name: old, when: {when}, to: drop}}]")
    (route,) = loaded.recipe.dataflow.routes
    assert route.when.before is not None
    assert route.when.before.isoformat() == "2026-11-30T12:00:00+00:00"
    assert parse_recipe(loaded.yaml_text).recipe == loaded.recipe


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        ("{name: a, to: drop}", "nothing is left to train policy 'solver' on: 'a' takes all its groups"),
        (
            "{name: a, when: {policies: [solver]}, to: evaluation}",
            "nothing is left to train policy 'solver' on",
        ),
        ("{name: a, when: {policies: [solvr]}, to: drop}", "there is no trained policy 'solvr'"),
        (
            "{name: a, when: {min_reward: 1}, to: archive}",
            "the run keeps no archive; add `dataflow.archive: {}`",
        ),
        (
            "{name: a, when: {min_reward: 1, max_reward: 0}, to: drop}",
            "no group has min_reward 1.0 and max_reward 0.0",
        ),
        ("{name: a, when: {after: 2026-11-30T12:00:00}, to: drop}", "should have timezone info"),
        (
            "{name: a, when: {sources: [x, y]}, to: drop}, {name: b, when: {sources: [x], min_version: 1}, to: drop}",
            "(b) is never reached: 'a' before it takes every group that it is of",
        ),
        (
            "{name: a, when: {min_version: 1}, to: drop}, {name: b, when: {min_version: 2, max_version: 3}, to: train}",
            "(b) is never reached",
        ),
        (
            "{name: a, when: {sources: [x]}, to: drop}, {name: a, when: {sources: [y]}, to: drop}",
            "another route has this name",
        ),
    ],
)
def test_routes_that_contradict_each_other_are_refused(routes: str, reason: str) -> None:
    with pytest.raises(RecipeError) as refused:
        tiny_recipe(f"dataflow.routes=[{routes}]")
    assert reason in str(refused.value)


def test_a_route_to_training_leaves_something_to_train_on() -> None:
    routes = "{name: good, when: {min_reward: 0.1}, to: train}, {name: rest, to: drop}"
    assert len(tiny_recipe(f"dataflow.routes=[{routes}]").recipe.dataflow.routes) == 2


def test_a_batch_cannot_need_more_than_it_has() -> None:
    tiny_recipe("dataflow.groups_per_step=4", "dataflow.batch_needs={min_sources: 4}")
    with pytest.raises(
        RecipeError, match="min_signal 5 is more than the 4 new groups of a batch of policy 'solver'"
    ):
        tiny_recipe("dataflow.groups_per_step=4", "dataflow.batch_needs={min_signal: 5}")
    # Of four groups one is replayed.
    with pytest.raises(RecipeError, match="min_sources 4 is more than the 3 new groups"):
        tiny_recipe("dataflow={groups_per_step: 4, replay: {}, batch_needs: {min_sources: 4}}")
