"""Golden values of every baseline, scale and preset, computed by hand, and the rules for groups without variance."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.recipe.advantage import (
    AdvantageSettings,
    AnyAdvantage,
    AtGrpo,
    Baseline,
    DesignerExecutor,
    DrGrpo,
    DrMas,
    Grpo,
    Hierarchical,
    Joint,
    Margin,
    MaxRl,
    NoReward,
    Opo,
    Quality,
    Rae,
    Reinforce,
    ReinforcePpBaseline,
    Rloo,
    Scale,
    Singleton,
)
from astraflow.recipe.dataflow import DEFAULT_MAX_ABS_REWARD
from astraflow.recipe.section import kind_of
from astraflow_trainer.batches.rows import RowOrigin
from astraflow_trainer.step.advantages import Advantages, compute_advantages

REWARDS = [1.0, 0.0, 0.0, 1.0, 3.0, 3.0]
KEYS = ["a", "a", "a", "a", "b", "c"]


def _of_groups(settings: AdvantageSettings, rewards: list[float], keys: list[str]) -> Advantages:
    """Advantages of rows that differ in their task only."""
    return compute_advantages(rewards, origins=[RowOrigin(key) for key in keys], settings=settings)


def _advantages(settings: AdvantageSettings, rewards: list[float], keys: list[str]) -> list[float]:
    return _of_groups(settings, rewards, keys).values.tolist()


# Group a: mean 0.5, squares 4 · 0.25 = 1, variance 1 / 3, deviation 0.57735; singletons get 0.
GRPO = 0.5 / (0.5773502691896258 + 1e-4)
# Of [1, 3, 5, −1]: mean 2, squares 1 + 1 + 9 + 9 = 20 over 4 numbers, a deviation of the root of 5.
ROOT = 1 / 5**0.5
OF_BATCH = AdvantageSettings(baseline=Baseline.BATCH, scale=Scale.BATCH, unbiased=False, eps=0.0)
BIASED = AdvantageSettings(unbiased=False, eps=0.0)
UNCENTRED = AdvantageSettings(baseline=Baseline.NONE, scale=Scale.GROUP)
LEFT_OUT = Rloo(singleton=Singleton.ZERO)
MAS = 0.5 / (0.5773502691896258 + 1e-6)
NEITHER = AdvantageSettings(baseline=Baseline.NONE, scale=Scale.NONE)
BY_HAND = {
    "grpo divides by the unbiased deviation": (Grpo(), REWARDS, KEYS, [GRPO, -GRPO, -GRPO, GRPO, 0, 0]),
    "the biased deviation divides by n": (BIASED, REWARDS, KEYS, [1, -1, -1, 1, 0, 0]),
    "dr grpo only subtracts the mean": (DrGrpo(), [4.0, 1.0, 1.0], ["a"] * 3, [2, -1, -1]),
    "rloo subtracts the mean of the others": (Rloo(), [4.0, 1.0, 1.0], ["a"] * 3, [3, -1.5, -1.5]),
    "rloo of a single member has no baseline": (Rloo(), [4.0], ["a"], [4.0]),
    "batch ignores groups": (OF_BATCH, [1.0, 3.0, 5.0, -1.0], [*"abcd"], [-ROOT, ROOT, 3 * ROOT, -3 * ROOT]),
    "neither baseline nor scale": (NEITHER, REWARDS, KEYS, REWARDS),
    "leaving one out of one, by the other rule": (LEFT_OUT, [4.0], ["a"], [0.0]),
    "dr mas gives a group of one its reward": (DrMas(), REWARDS, KEYS, [MAS, -MAS, -MAS, MAS, 3, 3]),
    "reinforce takes rewards as they are": (Reinforce(), REWARDS, KEYS, REWARDS),
    "none counts no reward": (NoReward(), REWARDS, KEYS, [0.0] * 6),
    "reinforce++ with baseline subtracts it before tokens are whitened": (
        ReinforcePpBaseline(),
        REWARDS,
        KEYS,
        [0.5, -0.5, -0.5, 0.5, 0, 0],
    ),
    "maxrl divides by the mean": (MaxRl(), REWARDS, KEYS, [1, -1, -1, 1, 0, 0]),
    "maxrl of a mean below 0 keeps the sign": (MaxRl(), [-3.0, -1.0], ["a"] * 2, [-0.5, 0.5]),
    "a flat group without baseline": (UNCENTRED, [2.0, 2.0], ["a", "a"], [2.0, 2.0]),
}


@pytest.mark.parametrize(("settings", "rewards", "keys", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_advantages_by_hand(
    settings: AdvantageSettings, rewards: list[float], keys: list[str], expected: list[float]
) -> None:
    assert _advantages(settings, rewards, keys) == pytest.approx(expected, rel=1e-12)


def test_every_advantage_has_its_numbers_by_hand() -> None:
    here = {kind_of(type(settings)) for settings, *_ in (*BY_HAND.values(), *PRESETS.values())}
    elsewhere = {"opo", "reinforce_pp", "gae"}  # below, and in test_token_advantages.py
    assert {*here, *elsewhere} >= {kind_of(member) for member in get_args(AnyAdvantage)}


def test_opo_weighs_the_baseline_by_trained_tokens() -> None:
    origins = [RowOrigin(key) for key in "aaabb"]
    lengths = [10, 20, 70, 5, 9]
    found = compute_advantages([1, 0, 2, 4, 4], origins=origins, settings=Opo(), lengths=lengths)
    # (10 · 1 + 20 · 0 + 70 · 2) / 100 = 1.5; equal rewards get exactly 0.
    assert found.values.tolist() == [-0.5, -1.5, 0.5, 0.0, 0.0]


def test_groups_without_variance_are_flagged_and_get_exactly_zero() -> None:
    # 0.1 + 0.1 + 0.1 is not 0.3 in binary, so a naive mean would leave a residue.
    result = _of_groups(Grpo(), [0.1, 0.1, 0.1, 1.0, 0.0, 5.0], list("aaabbc"))
    assert result.zero_variance.tolist() == [True, True, True, False, False, True]
    assert (result.num_groups, result.num_zero_variance_groups) == (3, 2)
    assert result.values[[0, 1, 2, 5]].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_group_members_need_not_be_adjacent() -> None:
    apart = _advantages(Grpo(), [1.0, 7.0, 0.0, 2.0], ["a", "b", "a", "b"])
    together = _advantages(Grpo(), [1.0, 0.0, 7.0, 2.0], ["a", "a", "b", "b"])
    assert [apart[0], apart[2], apart[1], apart[3]] == together


def test_origin_count_and_finiteness_are_checked() -> None:
    with pytest.raises(ValueError, match="2 rewards and 1 origins"):
        _advantages(Grpo(), [1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match="1 of 2 rewards are not finite"):
        _advantages(Grpo(), [1.0, float("nan")], ["a", "a"])


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


# Two tasks of two episodes each. In task t, episode 0 has three turns of the solver and one of the critic, episode 1
# one of each; in task u every episode has one turn of the solver.
AT = [
    RowOrigin("t", "solver", 0, 0, "sums"),
    RowOrigin("t", "solver", 0, 1, "sums"),
    RowOrigin("t", "solver", 0, 2, "sums"),
    RowOrigin("t", "critic", 0, 0, "sums"),
    RowOrigin("t", "solver", 1, 0, "sums"),
    RowOrigin("t", "critic", 1, 0, "sums"),
    RowOrigin("u", "solver", 0, 0, "words"),
    RowOrigin("u", "solver", 1, 0, "words"),
]
GIVEN = [0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 4.0, 2.0]
# Episode 0 of t has the mean (0 + 1 + 0.5 + 1) / 4 = 0.625, episode 1 (1 + 0) / 2 = 0.5: their mean is 0.5625, their
# deviation 0.125 / √2. Task u: 4 and 2, mean 3, deviation √2.
ABOVE, OF_U = 0.0625 / (0.125 / 2**0.5 + 1e-6), 1 / (2**0.5 + 1e-6)
# The three turns of episode 0: mean 0.5, squares 0.25 + 0.25 over 2, deviation 0.5. The others are put together per
# task and role: the solver's 1.0 of episode 1 alone, critics 1 and 0 and solvers 4 and 2 (mean 3, deviation √2).
OF_DESIGN, OF_CRITICS, OF_SOLVERS = 0.5 / (0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)
# Margin, weight 0.5. Turn 1: 1 + 0.5 · (1 − 0) = 1.5. Turn 2: 0.5 + 0.5 · (0.5 − 0.5) = 0.5. The solver's group of t is
# then 0, 1.5, 0.5, 1: mean 0.75, squares 0.5625 + 0.5625 + 0.0625 + 0.0625 = 1.25 over 3.
BY_MARGIN = (1.25 / 3) ** 0.5
# Quality, weight 0.5. Turn 1, Q = 0: 1 + 0.5 · (0 − 1 · 0) = 1. Turn 2, Q = 0.5: 0.5 + 0.5 · (0.25 − 0.25) = 0.5.
# Group 0, 1, 0.5, 1: mean 0.625, squares 0.390625 + 0.140625 + 0.015625 + 0.140625 = 0.6875 over 3.
BY_QUALITY = (0.6875 / 3) ** 0.5
HALF, UNIT = 0.5 / 0.5**0.5, 0.5**0.5
PRESETS = {
    # The mean of t's solver is 0.625.
    "dr_grpo": (DrGrpo(), [-0.625, 0.375, -0.125, 0.5, 0.375, -0.5, 1, -1]),
    "joint": (Joint(), [ABOVE] * 4 + [-ABOVE] * 2 + [OF_U, -OF_U]),
    # Turn 0 of t's solver: 0 and 1. Turns 1 and 2 are alone.
    "at_grpo": (AtGrpo(), [-0.5, 0, 0, 0.5, 0.5, -0.5, 1, -1]),
    "designer_executor": (
        DesignerExecutor(),
        [-OF_DESIGN, OF_DESIGN, 0, OF_CRITICS, 0, -OF_CRITICS, OF_SOLVERS, -OF_SOLVERS],
    ),
    "hierarchical": (Hierarchical(), [-0.5, 0.5, 0, 0, 0, 0, 0, 0]),
    "margin": (
        Margin(),
        [*(x / BY_MARGIN for x in (-0.75, 0.75, -0.25)), HALF, 0.25 / BY_MARGIN, -HALF, UNIT, -UNIT],
    ),
    "quality": (
        Quality(),
        [*(x / BY_QUALITY for x in (-0.625, 0.375, -0.125)), HALF, 0.375 / BY_QUALITY, -HALF, UNIT, -UNIT],
    ),
    "rae": (Rae(), GIVEN),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_hand(name: str) -> None:
    settings, expected = PRESETS[name]
    result = compute_advantages(GIVEN, origins=AT, settings=settings)
    assert result.values.tolist() == pytest.approx(expected, rel=1e-8)


def test_a_running_baseline_is_subtracted_before_it_is_updated() -> None:
    before = {"role=solver/source=sums": 0.5, "role=judge/source=sums": 9.0}
    result = compute_advantages(GIVEN, origins=AT, settings=Rae(decay=0.5), baselines=before)
    assert result.values.tolist() == [-0.5, 0.5, 0.0, 1.0, 0.5, 0.0, 4.0, 2.0]
    # Four rows of mean 0.625: 0.5^4 · 0.5 + (1 − 0.5^4) · 0.625. Two of mean 0.5 and two of mean 3, from 0: 3/4 of it.
    assert result.baselines == {
        "role=solver/source=sums": 0.0625 * 0.5 + 0.9375 * 0.625,
        "role=critic/source=sums": 0.375,
        "role=solver/source=words": 2.25,
    }
    assert before["role=solver/source=sums"] == 0.5


def test_one_row_moves_a_running_baseline_as_published() -> None:
    result = compute_advantages(
        [1.0], origins=AT[:1], settings=Rae(), baselines={"role=solver/source=sums": 0.2}
    )
    assert result.values.tolist() == [0.8]
    assert result.baselines["role=solver/source=sums"] == pytest.approx(0.95 * 0.2 + 0.05 * 1.0)


@pytest.mark.parametrize("name", PRESETS)
@given(rewards=st.lists(st.floats(-5, 5), min_size=8, max_size=8), order=st.permutations(range(8)))
def test_the_order_of_rows_changes_no_bit(name: str, rewards: list[float], order: list[int]) -> None:
    settings, _ = PRESETS[name]
    straight = compute_advantages(rewards, origins=AT, settings=settings)
    turned = compute_advantages(
        [rewards[at] for at in order], origins=[AT[at] for at in order], settings=settings
    )
    assert turned.values.tolist() == straight.values[order].tolist()
    assert turned.baselines == straight.baselines


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.integers(1, 5))
def test_an_episode_with_more_rows_weighs_no_more_in_joint(rewards: list[float], copies: int) -> None:
    """Its rows are trained on more often, and the advantage of the others stays the same."""
    once = [RowOrigin("t", "solver", member) for member in range(len(rewards))]
    settings = Joint(scale=Scale.NONE)
    expected = compute_advantages(rewards, origins=once, settings=settings).values
    more = compute_advantages(
        [*rewards, *rewards[:1] * copies], origins=[*once, *once[:1] * copies], settings=settings
    )
    assert more.values[: len(rewards)] == pytest.approx(expected, abs=1e-12)


EVERY = [settings for settings, *_ in (*BY_HAND.values(), *PRESETS.values())]
PLACES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=5)


@given(st.sampled_from(EVERY), st.sampled_from([0.0, 0.1, 1.0, -2.0]), PLACES, st.floats(-5, 5))
def test_what_settings_call_zero_for_equal_rewards_is_zero_whatever_else_the_batch_has(
    settings: AdvantageSettings, reward: float, places: list[tuple[int, int]], other: float
) -> None:
    origins = [RowOrigin("t", "solver", member, turn, "sums") for member, turn in places]
    rewards = [*[reward] * len(places), *[other] * len(AT)]
    others = [replace(at, task_id="v") for at in AT]
    values = compute_advantages(rewards, origins=[*origins, *others], settings=settings).values
    if settings.is_zero(reward, num_rows=len(places)):
        assert not values[: len(places)].any()


MIXTURES = {
    "all at the bound": [1.0] * 8,
    "both ends": [1.0, -1.0] * 4,
    "one at the bound among small ones": [1.0, 0.0, 1e-6, 0.0, -1e-6, 0.0, 0.0, 1e-9],
    "one below": [-1.0, *[1.0] * 7],
    "sums of about 0": [1.0, -1.0, 1e-9, 0.0, -1.0, 1.0, 0.0, -1e-9],
}


@pytest.mark.parametrize("most", [DEFAULT_MAX_ABS_REWARD, 1e9])
@pytest.mark.parametrize("shares", MIXTURES.values(), ids=MIXTURES)
def test_up_to_the_bound_of_rewards_every_estimator_is_finite_and_loses_no_group(
    shares: list[float], most: float
) -> None:
    rewards, lengths = [share * most for share in shares], [1, 1_048_576, 7, 7, 9, 1, 3, 1_048_576]
    before = dict.fromkeys(("role=solver/source=sums", "role=critic/source=sums"), -most)
    for settings in EVERY:
        found = compute_advantages(rewards, origins=AT, settings=settings, lengths=lengths, baselines=before)
        assert np.isfinite(found.values.astype(np.float32)).all()
        assert np.isfinite([*found.baselines.values()]).all()
        for task in {at.task_id for at in AT} if settings.baseline is not Baseline.OWN else ():
            rows = [row for row, at in enumerate(AT) if at.task_id == task]
            assert found.zero_variance[rows].all() or found.values[rows].any()
