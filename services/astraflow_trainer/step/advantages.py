"""Advantages: how rewards become the weights of a policy gradient.

Owns every normalisation of rewards, as a pure function of (rewards, origins, settings, running baselines) over all
rows of a batch that have the same settings. Invariant: a group whose rewards are all equal gets advantages of exactly
0 whenever a group baseline is subtracted, and is flagged; only a group of one may get its reward instead, where the
settings say so. The order of rows changes no bit. Called by `estimators`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from astraflow.recipe.advantage import AdvantageSettings, Baseline, Scale, Singleton
from astraflow_trainer.batches.rows import RowOrigin
from astraflow_trainer.step.groups import FloatArray, Samples, baseline_names, mean, samples_of

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
    baselines: Mapping[str, float] = field(default_factory=dict)
    """The running baselines that this batch changed, as they are after it."""


def compute_advantages(
    rewards: Sequence[float] | FloatArray,
    *,
    origins: Sequence[RowOrigin],
    settings: AdvantageSettings,
    lengths: Sequence[int] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> Advantages:
    """Advantages of all rows with these settings. Raises ValueError when origins and rewards differ in number or a
    reward is not finite.

    `lengths` are the trained tokens of each row, for baselines that weigh by them. `baselines` are the running
    baselines before this batch, by name; one that is not there is 0.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) != len(origins):
        raise ValueError(f"{len(values)} rewards and {len(origins)} origins; give one origin per reward")
    if not np.isfinite(values).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(values))} of {len(values)} rewards are not finite")
    samples = samples_of(values, origins=origins, settings=settings)
    lengths_M = np.ones(len(values)) if lengths is None else np.asarray(lengths, dtype=np.float64)
    subtracted, changed = _baselines(samples, lengths=lengths_M, settings=settings), dict[str, float]()
    if settings.baseline is Baseline.RUNNING:
        names = baseline_names([origins[row] for row in samples.first_row], settings=settings)
        subtracted, changed = _running(samples, names=names, before=baselines or {}, decay=settings.decay)
    advantages = (samples.values - subtracted) / _scales(samples, settings=settings)
    return flagged(advantages[samples.of_row], samples=samples, baselines=changed)


def flagged(
    values: FloatArray, *, samples: Samples, baselines: Mapping[str, float] | None = None
) -> Advantages:
    """Return `values`, one per row, with what is to be known of the groups of `samples`."""
    flat = [_all_equal(samples.values[members]) for members in samples.groups]
    zero_variance = np.zeros(len(samples.values), dtype=bool)
    for members, is_flat in zip(samples.groups, flat, strict=True):
        zero_variance[members] = is_flat
    return Advantages(
        values=values,
        zero_variance=zero_variance[samples.of_row],
        num_groups=len(flat),
        num_zero_variance_groups=sum(flat),
        baselines=baselines or {},
    )


def _all_equal(rewards: FloatArray) -> bool:
    return bool(np.ptp(rewards) <= _EQUAL_RTOL * np.abs(rewards).max())


def _baselines(samples: Samples, *, lengths: FloatArray, settings: AdvantageSettings) -> FloatArray:
    values, baseline = samples.values, settings.baseline
    result = np.zeros_like(values)
    if baseline is Baseline.OWN:
        return values
    if baseline is Baseline.BATCH and len(values):
        return values if _all_equal(values) else np.full_like(values, mean(values))
    if baseline in (Baseline.GROUP, Baseline.LEAVE_ONE_OUT, Baseline.LENGTH_WEIGHTED):
        for members in samples.groups:
            result[members] = _of_group(values[members], lengths=lengths[members], settings=settings)
    return result


def _of_group(rewards: FloatArray, *, lengths: FloatArray, settings: AdvantageSettings) -> FloatArray:
    if len(rewards) == 1 and settings.singleton is Singleton.REWARD:
        return np.zeros(1)
    # The mean of equal numbers can differ from them in the last bit; their advantage must be exactly 0.
    if _all_equal(rewards):
        return rewards
    if settings.baseline is Baseline.LEAVE_ONE_OUT:
        others: FloatArray = (math.fsum(rewards) - rewards) / (len(rewards) - 1)
        return others
    if settings.baseline is Baseline.LENGTH_WEIGHTED:
        return np.full_like(rewards, math.fsum(rewards * lengths) / math.fsum(lengths))
    return np.full_like(rewards, mean(rewards))


def _running(
    samples: Samples, *, names: Sequence[str], before: Mapping[str, float], decay: float
) -> tuple[FloatArray, dict[str, float]]:
    """Baselines as they were before this batch, which is what is subtracted, and as they are after it."""
    result, after = np.zeros_like(samples.values), dict[str, float]()
    for members in samples.groups:
        name = names[members[0]]
        kept = decay ** len(members)
        result[members] = before.get(name, 0.0)
        after[name] = kept * before.get(name, 0.0) + (1 - kept) * mean(samples.values[members])
    return result, after


def _scales(samples: Samples, *, settings: AdvantageSettings) -> FloatArray:
    values = samples.values
    result = np.ones_like(values)
    if settings.scale is Scale.BATCH and len(values):
        result[:] = _scale(values, settings=settings)
    elif settings.scale in (Scale.GROUP, Scale.GROUP_MEAN):
        for members in samples.groups:
            result[members] = _scale(values[members], settings=settings)
    return result


def _scale(rewards: FloatArray, *, settings: AdvantageSettings) -> float:
    if _all_equal(rewards):
        return 1.0
    if settings.scale is Scale.GROUP_MEAN:
        # Rewards below 0 may sum to about 0, which must not make an advantage infinite.
        return max(abs(mean(rewards)), _EQUAL_RTOL) + settings.eps
    squares = math.fsum((rewards - mean(rewards)) ** 2)
    return math.sqrt(squares / (len(rewards) - settings.unbiased)) + settings.eps
