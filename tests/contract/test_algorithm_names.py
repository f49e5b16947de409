"""The names that recipes say algorithms by: one that goes away breaks them."""

from typing import Any, get_args

import pytest

from astraflow.recipe import algorithm
from astraflow.recipe.advantage import AnyAdvantage
from astraflow.recipe.section import kind_of
from support.source_tree import REPOSITORY

NAMES: dict[str, tuple[Any, str]] = {
    "advantage": (
        AnyAdvantage,
        "grpo dr_grpo rloo reinforce none reinforce_pp reinforce_pp_baseline gae maxrl opo dr_mas joint at_grpo "
        "designer_executor hierarchical rae margin quality",
    ),
    "loss": (
        algorithm.LossSettings,
        "none ppo_clip dual_clip m2po m2po_clip m2po_mask gspo gmpo cispo sapo dppo sft",
    ),
    "anchor": (algorithm.Anchor, "behavior proximal bypass"),
    "aggregation": (
        algorithm.Aggregation,
        "token_mean token_sum seq_mean_token_mean seq_mean_token_sum constant",
    ),
    "mismatch.weight": (algorithm.AnyWeight, "none tis mis icepop"),
    "mismatch.reject": (algorithm.AnyReject, "geometric kl"),
}
PRESETS = (
    "grpo dr_grpo dapo rloo reinforce_pp reinforce_pp_baseline maxrl opo gspo gmpo cispo sapo dppo m2po ppo "
    "opd sft"
)
ESTIMATORS = "k1 k2 k3 k3_k2"


@pytest.mark.parametrize("key", NAMES)
def test_the_names_of_a_key_are_these_and_the_page_has_them(key: str) -> None:
    union, names = NAMES[key]
    assert [kind_of(member) for member in get_args(union)] == names.split()
    text = "".join((REPOSITORY / "docs" / page).read_text() for page in ("trainer.md", "roles.md"))
    assert [name for name in names.split() if f"`{name}`" not in text and f"kind: {name}," not in text] == []


def test_presets_and_estimators_are_these() -> None:
    assert list(algorithm.PRESETS) == PRESETS.split()
    assert [estimator.value for estimator in algorithm.KlEstimator] == ESTIMATORS.split()
    section = (REPOSITORY / "docs" / "trainer.md").read_text().split("### Presets")[1].split("\n### ")[0]
    assert [name for name in PRESETS.split() if f"`{name}`" not in section] == []
