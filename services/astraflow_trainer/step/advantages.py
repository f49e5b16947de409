"""Advantages: how rewards become the weights of a policy gradient.

Owns every normalisation of rewards, as a pure function of (rewards, group keys, settings) over the whole
batch. Invariant: a group whose rewards are all equal gets advantages of exactly 0 whenever a group baseline
is subtracted, and is flagged. Called by the training step once per batch.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from astraflow.recipe.algorithm import AdvantageSettings, Baseline, Scale

FloatArray: TypeAlias = NDArray[np.float64]

# Rewards this close, relative to their size, are equal: averaging equal numbers leaves a residue of this
# order.
_EQUAL_RTOL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """One number per reward, in the order given."""

    values: FloatArray
    """float64[N]."""
    zero_variance: NDArray[np.bool_]
    """bool[N]; True for members of a group whose rewards are all equal (a group of one included)."""
    num_groups: int
    num_zero_variance_groups: int


def compute_advantages(
    rewards: Sequence[float] | FloatArray,
    *,
    group_keys: Sequence[Hashable],
    settings: AdvantageSettings | Callable[[FloatArray], FloatArray],
) -> Advantages:
    """Advantages of a whole batch. Raises ValueError when keys and rewards differ in number or a reward is
    not finite.

    `group_keys[i]` names the group of `rewards[i]`; members need not be adjacent. Settings may be a function of all
    rewards.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) != len(group_keys):
        raise ValueError(f"{len(values)} rewards and {len(group_keys)} group keys; give one key per reward")
    if not np.isfinite(values).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(values))} of {len(values)} rewards are not finite")
    groups = _members(group_keys)
    flat = [_all_equal(values[members]) for members in groups]
    zero_variance = np.zeros(len(values), dtype=bool)
    for members, is_flat in zip(groups, flat, strict=True):
        zero_variance[members] = is_flat
    if isinstance(settings, AdvantageSettings):
        centred = values - _baselines(values, groups=groups, baseline=settings.baseline)
        advantages = centred / _scales(values, groups=groups, settings=settings)
    else:
        advantages = settings(values)
    return Advantages(
        values=advantages,
        zero_variance=zero_variance,
        num_groups=len(groups),
        num_zero_variance_groups=sum(flat),
    )


def _members(group_keys: Sequence[Hashable]) -> list[NDArray[np.intp]]:
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(group_keys):
        positions.setdefault(key, []).append(position)
    return [np.asarray(members, dtype=np.intp) for members in positions.values()]


def _all_equal(rewards: FloatArray) -> bool:
    return bool(np.ptp(rewards) <= _EQUAL_RTOL * np.abs(rewards).max())


def _baselines(values: FloatArray, *, groups: list[NDArray[np.intp]], baseline: Baseline) -> FloatArray:
    if baseline is Baseline.NONE or not len(values):
        return np.zeros_like(values)
    if baseline is Baseline.BATCH:
        return values if _all_equal(values) else np.full_like(values, values.mean())
    result = np.empty_like(values)
    for members in groups:
        rewards = values[members]
        if baseline is Baseline.LEAVE_ONE_OUT:
            result[members] = _others_mean(rewards)
        else:
            # The mean of equal numbers can differ from them in the last bit; their advantage must be exactly
            # 0.
            result[members] = rewards if _all_equal(rewards) else rewards.mean()
    return result


def _others_mean(rewards: FloatArray) -> FloatArray:
    if len(rewards) == 1:
        return np.zeros(1)
    if _all_equal(rewards):
        return rewards

    others: FloatArray = (rewards.sum() - rewards) / (len(rewards) - 1)
    return others


def _scales(values: FloatArray, *, groups: list[NDArray[np.intp]], settings: AdvantageSettings) -> FloatArray:
    result = np.ones_like(values)
    if settings.scale is Scale.BATCH and len(values):
        result[:] = _scale(values, settings=settings)
    elif settings.scale is Scale.GROUP:
        for members in groups:
            result[members] = _scale(values[members], settings=settings)
    return result


def _scale(rewards: FloatArray, *, settings: AdvantageSettings) -> float:
    if _all_equal(rewards):
        return 1.0
    return float(rewards.std(ddof=1 if settings.unbiased else 0)) + settings.eps
