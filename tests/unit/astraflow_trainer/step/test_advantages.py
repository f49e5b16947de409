"""Golden values of every baseline and scale, and the rules for groups without variance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.recipe.algorithm import AdvantageSettings, Baseline, DrGrpo, Grpo, Rloo, Scale
from astraflow_trainer.step.advantages import compute_advantages

REWARDS = [1.0, 0.0, 0.0, 1.0, 3.0, 3.0]
KEYS = ["a", "a", "a", "a", "b", "c"]


def _advantages(settings: AdvantageSettings, rewards: list[float], keys: list[str]) -> list[float]:
    return compute_advantages(rewards, group_keys=keys, settings=settings).values.tolist()


# Group a: mean 0.5, squares 4 · 0.25 = 1, variance 1 / 3, deviation 0.57735; singletons get 0.
GRPO = 0.5 / (0.5773502691896258 + 1e-4)
# Of [1, 3, 5, −1]: mean 2, squares 1 + 1 + 9 + 9 = 20 over 4 numbers, a deviation of the root of 5.
ROOT = 1 / 5**0.5
OF_BATCH = AdvantageSettings(baseline=Baseline.BATCH, scale=Scale.BATCH, unbiased=False, eps=0.0)
BIASED = AdvantageSettings(unbiased=False, eps=0.0)
UNCENTRED = AdvantageSettings(baseline=Baseline.NONE, scale=Scale.GROUP)
NEITHER = AdvantageSettings(baseline=Baseline.NONE, scale=Scale.NONE)
BY_HAND = {
    "grpo divides by the unbiased deviation": (Grpo(), REWARDS, KEYS, [GRPO, -GRPO, -GRPO, GRPO, 0, 0]),
    "the biased deviation divides by n": (BIASED, REWARDS, KEYS, [1, -1, -1, 1, 0, 0]),
    "dr grpo only subtracts the mean": (DrGrpo(), [4.0, 1.0, 1.0], ["a"] * 3, [2, -1, -1]),
    "rloo subtracts the mean of the others": (Rloo(), [4.0, 1.0, 1.0], ["a"] * 3, [3, -1.5, -1.5]),
    "rloo of a single member has no baseline": (Rloo(), [4.0], ["a"], [4.0]),
    "batch ignores groups": (OF_BATCH, [1.0, 3.0, 5.0, -1.0], [*"abcd"], [-ROOT, ROOT, 3 * ROOT, -3 * ROOT]),
    "neither baseline nor scale": (NEITHER, REWARDS, KEYS, REWARDS),
    "a flat group without baseline": (UNCENTRED, [2.0, 2.0], ["a", "a"], [2.0, 2.0]),
}


@pytest.mark.parametrize(("settings", "rewards", "keys", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_advantages_by_hand(
    settings: AdvantageSettings, rewards: list[float], keys: list[str], expected: list[float]
) -> None:
    assert _advantages(settings, rewards, keys) == pytest.approx(expected, rel=1e-12)


def test_groups_without_variance_are_flagged_and_get_exactly_zero() -> None:
    # 0.1 + 0.1 + 0.1 is not 0.3 in binary, so a naive mean would leave a residue.
    result = compute_advantages([0.1, 0.1, 0.1, 1.0, 0.0, 5.0], group_keys=list("aaabbc"), settings=Grpo())
    assert result.zero_variance.tolist() == [True, True, True, False, False, True]
    assert (result.num_groups, result.num_zero_variance_groups) == (3, 2)
    assert result.values[[0, 1, 2, 5]].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_group_members_need_not_be_adjacent() -> None:
    apart = _advantages(Grpo(), [1.0, 7.0, 0.0, 2.0], ["a", "b", "a", "b"])
    together = _advantages(Grpo(), [1.0, 0.0, 7.0, 2.0], ["a", "a", "b", "b"])
    assert [apart[0], apart[2], apart[1], apart[3]] == together


def test_key_count_and_finiteness_are_checked() -> None:
    with pytest.raises(ValueError, match="2 rewards and 1 group keys"):
        compute_advantages([1.0, 2.0], group_keys=["a"], settings=Grpo())
    with pytest.raises(ValueError, match="1 of 2 rewards are not finite"):
        compute_advantages([1.0, float("nan")], group_keys=["a", "a"], settings=Grpo())


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=12),
    st.floats(0.5, 4),
    st.floats(-3, 3),
)
def test_grpo_ignores_shift_and_scale_of_rewards(rewards: list[float], scale: float, shift: float) -> None:
    if np.std(rewards) < 1e-2:
        return
    settings = AdvantageSettings(eps=0.0)
    keys = ["a"] * len(rewards)
    changed = [scale * reward + shift for reward in rewards]
    expected = pytest.approx(_advantages(settings, rewards, keys), abs=1e-6)
    assert _advantages(settings, changed, keys) == expected
