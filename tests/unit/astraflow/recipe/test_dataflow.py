"""Settings of the data path and of pools that contradict each other are refused with the remedy."""

from typing import Any

import pytest
from pydantic import ValidationError

from astraflow.recipe.dataflow import ArchiveSettings, AutoscalingSettings

POOLS = {"eu": {"min_nodes": 1, "max_nodes": 2}, "us": {"min_nodes": 1, "max_nodes": 4}}


def test_log_probs_of_trainers_need_samples_that_were_trained_on() -> None:
    with pytest.raises(ValidationError, match=r"keep is \['stale'\]; add `trained` to it"):
        ArchiveSettings(keep=("stale",), trainer_logprobs=True)
    for keep in (("all",), ("stale", "trained")):
        assert ArchiveSettings.model_validate({"keep": keep, "trainer_logprobs": True}).trainer_logprobs


@pytest.mark.parametrize(
    ("nodes", "split"), [(2, (1, 1)), (3, (2, 1)), (5, (2, 3)), (6, (2, 4)), (9, (2, 4))]
)
def test_the_first_pool_is_filled_first(nodes: int, split: tuple[int, int]) -> None:
    found = AutoscalingSettings.model_validate({"pools": POOLS}).split(nodes)
    assert (found["eu"], found["us"]) == split


def test_a_run_starts_with_what_it_is_told_or_with_the_least() -> None:
    assert AutoscalingSettings.model_validate({"pools": POOLS}).first_nodes == 2
    assert AutoscalingSettings.model_validate({"pools": POOLS, "start_nodes": 5}).first_nodes == 5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pools": {}}, "at least 1 item"),
        ({"pools": {"eu": {"min_nodes": 3, "max_nodes": 2}}}, "min_nodes is 3, max_nodes 2; swap them"),
        ({"pools": {"Eu": {"max_nodes": 2}}}, "pattern"),
        ({"shrink_below_wait": 0.2}, "leave room between them"),
        ({"start_nodes": 7}, "start_nodes is 7; the pools have 2 to 6 nodes"),
        ({"window": 3}, "Extra inputs"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        AutoscalingSettings.model_validate({"pools": POOLS} | changes)
