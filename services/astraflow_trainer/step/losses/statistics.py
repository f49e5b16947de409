"""Statistics of a policy loss, added up over micro-batches and ranks.

Invariant: what is kept are sums and maxima, so adding statistics of any split of the tokens gives those of
the whole. Filled by the loss kernel, reduced and read by the training step.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch

from astraflow_trainer.ranks.reductions import Ranks

SUMS = (
    "num_tokens", "loss", "ratio", "squared_ratio", "squared_log_ratio", "mismatch_kl",
    "in_place", "mismatch_kl_in_place", "entropy", "kl",
    "clipped_up", "clipped_down", "masked", "rejected", "num_away", "squared_log_ratio_away",
)  # fmt: skip
_MAXIMA = ("ratio", "negative_ratio", "abs_log_ratio")
_BIN_NATS, _BINS_EACH_WAY = 0.01, 512
"""Log-ratios are counted in bins of this width around 0; the outermost have all beyond 5.12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """What one step's loss looked like, over all trained tokens of all ranks. Means are per token unless
    said.
    """

    loss: float
    """The aggregated loss, KL term included."""
    num_tokens: int
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    """The ratio to the anchor; that of the row for GSPO and GMPO."""
    ratio_p99: float
    """Its 99th percentile over tokens, to half a percent."""
    clip_fraction_up: float
    """Share of tokens whose ratio is cut from above."""
    clip_fraction_down: float
    """Share of tokens whose ratio is cut from below."""
    masked_fraction: float
    """Share of tokens left out by m2po_mask or dppo."""
    rejected_fraction: float
    """Share of tokens left out by `mismatch`: of weight 0, rejected, or vetoed."""
    effective_sample_size: float
    """(Σr)² / (n·Σr²), within 0 and 1."""
    mismatch_kl: float
    """KL(behaviour ‖ policy) by the estimate r − 1 − log r, r to the engine's log-probs: what staleness and engine add
    up to.
    """
    in_place_fraction: float
    """Share of tokens of calls that went on over a swap of weights with the keys and values of the old ones."""
    mismatch_kl_in_place: float
    """mismatch_kl over those tokens; 0 without any."""
    mismatch_kl_elsewhere: float
    """The same over all others."""
    entropy: float
    """Mean entropy of the next-token distribution, nats, at the row's temperature."""
    max_abs_log_ratio: float
    """Largest |l − l_mu|."""
    second_moment: float
    """Mean of (l − l_a)² over all tokens."""
    second_moment_away: float
    """The same over the tokens that moved away from the anchor (A > 0, r > 1 or A < 0, r < 1)."""
    kl: float
    """Mean KL estimate of the loss's own KL term; 0 without one."""


@dataclass(frozen=True, slots=True, eq=False)
class LossStatistics:
    """float64 sums and maxima over tokens, and in `counts` how many have a log-ratio in which bin."""

    sums: torch.Tensor
    maxima: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls) -> Self:
        """Statistics of no token."""
        return cls(
            torch.zeros(len(SUMS), dtype=torch.float64),
            torch.full((len(_MAXIMA),), -math.inf, dtype=torch.float64),
            torch.zeros(2 * _BINS_EACH_WAY + 1, dtype=torch.float64),
        )

    @classmethod
    def of(
        cls, *, sums: dict[str, torch.Tensor], maxima: dict[str, torch.Tensor], log_ratio_N: torch.Tensor
    ) -> Self:
        """Statistics of some tokens; `sums` and `maxima` name every entry, `log_ratio_N` is to the anchor."""
        return cls(
            torch.stack([sums[name].double() for name in SUMS]),
            torch.stack([maxima[name].double() for name in _MAXIMA]),
            _ratio_counts(log_ratio_N),
        )

    def __add__(self, other: "LossStatistics") -> "LossStatistics":
        return LossStatistics(
            self.sums + other.sums, torch.maximum(self.maxima, other.maxima), self.counts + other.counts
        )

    def over_ranks(self, ranks: Ranks) -> "LossStatistics":
        """Statistics of the tokens of all ranks. A collective: every rank calls it."""
        added = ranks.sum(torch.cat([self.sums, self.counts]))
        return LossStatistics(added[: len(SUMS)], ranks.max(self.maxima), added[len(SUMS) :])

    def metrics(self) -> LossMetrics:
        """Means, extremes and shares. Raises ValueError when there was no token."""
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        num_tokens = sums["num_tokens"]
        if num_tokens == 0:
            raise ValueError("no token was trained, so there is nothing to average; skip the step")
        return LossMetrics(
            loss=sums["loss"],
            num_tokens=int(num_tokens),
            ratio_min=-maxima["negative_ratio"],
            ratio_mean=sums["ratio"] / num_tokens,
            ratio_max=maxima["ratio"],
            ratio_p99=min(maxima["ratio"], _percentile(self.counts, 0.99)),
            clip_fraction_up=sums["clipped_up"] / num_tokens,
            clip_fraction_down=sums["clipped_down"] / num_tokens,
            masked_fraction=sums["masked"] / num_tokens,
            rejected_fraction=sums["rejected"] / num_tokens,
            effective_sample_size=_ratio(sums["ratio"] ** 2, num_tokens * sums["squared_ratio"]),
            mismatch_kl=sums["mismatch_kl"] / num_tokens,
            in_place_fraction=sums["in_place"] / num_tokens,
            mismatch_kl_in_place=_ratio(sums["mismatch_kl_in_place"], sums["in_place"]),
            mismatch_kl_elsewhere=_ratio(
                sums["mismatch_kl"] - sums["mismatch_kl_in_place"], num_tokens - sums["in_place"]
            ),
            entropy=sums["entropy"] / num_tokens,
            max_abs_log_ratio=maxima["abs_log_ratio"],
            second_moment=sums["squared_log_ratio"] / num_tokens,
            second_moment_away=_ratio(sums["squared_log_ratio_away"], sums["num_away"]),
            kl=sums["kl"] / num_tokens,
        )


def _ratio_counts(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """float64[bins]: how many tokens are in each bin; one that is no number counts as 0."""
    bins = (log_ratio_N.detach().double().nan_to_num() / _BIN_NATS).round()
    places = bins.clamp(-_BINS_EACH_WAY, _BINS_EACH_WAY).long() + _BINS_EACH_WAY
    return torch.bincount(places, minlength=2 * _BINS_EACH_WAY + 1).double()


def _percentile(counts: torch.Tensor, share: float) -> float:
    """The ratio at the middle of the first bin up to which there is at least this share of the tokens."""
    up_to = counts.cumsum(0)
    place = int(torch.searchsorted(up_to, share * up_to[-1]))
    return math.exp(_BIN_NATS * (place - _BINS_EACH_WAY))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
