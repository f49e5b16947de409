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


def test_grpo_divides_by_the_unbiased_standard_deviation_plus_eps() -> None:
    # Group a: mean 0.5, squares 4 · 0.25 = 1, variance 1 / 3, deviation 0.57735; singletons get 0.
    expected = 0.5 / (0.5773502691896258 + 1e-4)
    assert _advantages(Grpo(), REWARDS, KEYS) == pytest.approx(
        [expected, -expected, -expected, expected, 0, 0]
    )


def test_biased_switch_divides_the_sum_of_squares_by_n() -> None:
    settings = AdvantageSettings(unbiased=False, eps=0.0)
    assert _advantages(settings, REWARDS, KEYS) == pytest.approx([1, -1, -1, 1, 0, 0])


def test_dr_grpo_only_subtracts_the_group_mean() -> None:
    assert _advantages(DrGrpo(), [4.0, 1.0, 1.0], ["a", "a", "a"]) == pytest.approx([2, -1, -1])


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert _advantages(Rloo(), [4.0, 1.0, 1.0], ["a", "a", "a"]) == pytest.approx([3, -1.5, -1.5])


def test_rloo_of_a_single_member_has_no_baseline() -> None:
    assert _advantages(Rloo(), [4.0], ["a"]) == [4.0]


def test_batch_baseline_and_scale_ignore_groups() -> None:
    settings = AdvantageSettings(baseline=Baseline.BATCH, scale=Scale.BATCH, unbiased=False, eps=0.0)
    # Mean 2, squares 1 + 1 + 9 + 1 + 4 = 16 over 4 numbers → deviation 2.
    assert _advantages(settings, [1.0, 3.0, 5.0, -1.0], ["a", "b", "c", "d"]) == pytest.approx(
        [-0.5 * 2 / 5**0.5, 0.5 * 2 / 5**0.5, 1.5 * 2 / 5**0.5, -1.5 * 2 / 5**0.5]
    )


def test_no_baseline_and_no_scale_returns_rewards() -> None:
    settings = AdvantageSettings(baseline=Baseline.NONE, scale=Scale.NONE)
    assert _advantages(settings, REWARDS, KEYS) == REWARDS


def test_group_scale_without_baseline_leaves_a_flat_group_at_its_reward() -> None:
    settings = AdvantageSettings(baseline=Baseline.NONE, scale=Scale.GROUP)
    assert _advantages(settings, [2.0, 2.0], ["a", "a"]) == [2.0, 2.0]


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
def test_grpo_is_unchanged_by_shifting_and_scaling_rewards(
    rewards: list[float], scale: float, shift: float
) -> None:
    if np.std(rewards) < 1e-2:
        return
    settings = AdvantageSettings(eps=0.0)
    keys = ["a"] * len(rewards)
    changed = [scale * reward + shift for reward in rewards]
    assert _advantages(settings, changed, keys) == pytest.approx(
        _advantages(settings, rewards, keys), abs=1e-6
    )
