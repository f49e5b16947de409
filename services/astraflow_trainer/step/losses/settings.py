"""What a policy loss is made of: ratio anchor × trust region × aggregation × optional KL.

Each part is a frozen dataclass or enum whose docstring gives its formula and source; any combination that
makes sense can be built, and one that does not is refused here, before training starts. Symbols, per trained
token: l the log-prob under the weights being trained, l_a under the anchor, r = exp(l − l_a) (log-ratio
clamped to ±20), A the advantage, sg[·] a value without gradient. Read by every other module of the package.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as a sentence at every call
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviorAnchor:
    """l_a = l_mu: the ratio is taken to what the sampler reported. One pass, no recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProximalAnchor:
    """l_a = l_prox, recomputed at the start of the step; each token weighted by sg[min(exp(l_prox − l_mu),
    cap)].

    Decoupled PPO, arXiv 2110.00641 and AReaL arXiv 2505.24298; the bounded weight is truncated importance
    sampling (TIS, token level). Costs one more forward pass when a step has several micro-batches.
    """

    weight_cap: float = 2.0

    def __post_init__(self) -> None:
        _require(self.weight_cap > 0, f"weight_cap {self.weight_cap} must be above 0")


Anchor: TypeAlias = BehaviorAnchor | ProximalAnchor


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTrustRegion:
    """−r·A: plain importance weighting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip:
    """max(−r·A, −clip(r, 1 − low, 1 + high)·A). PPO, arXiv 1707.06347; the wider upper bound is DAPO's,
    2503.14476.
    """

    low: float = 0.2
    high: float = 0.28

    def __post_init__(self) -> None:
        _require(0 <= self.low <= 1, f"low {self.low} must be within 0 and 1, so that 1 − low is a ratio")
        _require(self.high >= 0, f"high {self.high} must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DualClip:
    """PPO clip, and for A < 0 at most cap·|A|. arXiv 1912.09729: bounds the push away from a token that
    became likely.
    """

    low: float = 0.2
    high: float = 0.28
    cap: float = 3.0

    def __post_init__(self) -> None:
        PpoClip(low=self.low, high=self.high)
        _require(self.cap > 1, f"cap {self.cap} must be above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class M2po:
    """PPO clip whose bounds come from a second-moment budget over the whole step: the M2PO authors' published
    form.

    Over the tokens that move away from the anchor (A > 0 and r > 1, or A < 0 and r < 1), with d = l − l_a: if
    the mean of d² exceeds `budget`, find t such that the mean of min(d², t²) equals `budget` (water-filling)
    and clip with low = max(1 − e^−t, floor_low), high = max(e^t − 1, floor_high); else do not clip.
    "Prosperity before collapse", arXiv 2510.01161, code Infini-AI-Lab/M2PO (which rounds t down to the next
    smaller |d|; we keep the exact t).
    """

    budget: float = 0.04
    floor_low: float = 0.3
    floor_high: float = 0.5

    def __post_init__(self) -> None:
        _require(self.budget > 0, f"budget {self.budget} must be above 0")
        PpoClip(low=self.floor_low, high=self.floor_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poClip:
    """The form of the published AstraFlow code: same tokens, bound from the sorted suffix, and no floor.

    With d² sorted descending, k = the first index whose suffix mean falls below `budget` (the last one if
    none does), t = sqrt(d²_k): low = min(1 − e^−t, cap_low), high = min(e^t − 1, cap_high); the caps alone
    when the mean of d² is within the budget. There it is computed per micro-batch, here over the whole step.
    """

    budget: float = 0.01
    cap_low: float = 0.95
    cap_high: float = 20.0

    def __post_init__(self) -> None:
        _require(self.budget > 0, f"budget {self.budget} must be above 0")
        PpoClip(low=self.cap_low, high=self.cap_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poMask:
    """−r·A·M, where M drops the tokens of largest d² (both sides) until the mean of the rest is below
    `budget`.

    The form of AReaL. It also drops tokens that would restore the policy, so drift has no counter-force: a
    run whose `masked_fraction` exceeds 0.1 should change to M2po. The denominator keeps counting dropped
    tokens.
    """

    budget: float = 0.04

    def __post_init__(self) -> None:
        _require(self.budget > 0, f"budget {self.budget} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    """PPO clip of the sequence ratio s = exp(mean over the row of l − l_a), as s_t = sg[s]·exp(l − sg[l]).

    GSPO-token, arXiv 2507.18071, section 4.3; log s is clamped to at most 10. Use with seq_mean_token_mean.
    """

    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        PpoClip(low=self.low, high=self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """−sg[clip(r, min_ratio, max_ratio)]·A·l: clipped tokens keep their gradient. MiniMax-M1, arXiv
    2506.13585.

    The defaults are ScaleRL's (arXiv 2510.13786): no lower bound, ratio at most 5.
    """

    min_ratio: float = 0.0
    max_ratio: float = 5.0

    def __post_init__(self) -> None:
        _require(
            0 <= self.min_ratio <= 1 <= self.max_ratio,
            f"the ratio bounds {self.min_ratio} and {self.max_ratio} must enclose 1",
        )


TrustRegion: TypeAlias = NoTrustRegion | PpoClip | DualClip | M2po | M2poClip | M2poMask | Gspo | Cispo


class TrustRegionName(StrEnum):
    """Names of the trust regions in a recipe; `TRUST_REGIONS` maps each to its class."""

    NONE = "none"
    PPO_CLIP = "ppo_clip"
    DUAL_CLIP = "dual_clip"
    M2PO = "m2po"
    M2PO_CLIP = "m2po_clip"
    M2PO_MASK = "m2po_mask"
    GSPO = "gspo"
    CISPO = "cispo"


TRUST_REGIONS: dict[TrustRegionName, type[TrustRegion]] = {
    TrustRegionName.NONE: NoTrustRegion,
    TrustRegionName.PPO_CLIP: PpoClip,
    TrustRegionName.DUAL_CLIP: DualClip,
    TrustRegionName.M2PO: M2po,
    TrustRegionName.M2PO_CLIP: M2poClip,
    TrustRegionName.M2PO_MASK: M2poMask,
    TrustRegionName.GSPO: Gspo,
    TrustRegionName.CISPO: Cispo,
}


class Aggregation(StrEnum):
    """How the losses of all trained tokens of the step become one number; every form is Σ weight·loss."""

    TOKEN_MEAN = "token_mean"
    """Σ / trained tokens of the step (DAPO)."""
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    """Mean over rows of the row's token mean (GRPO)."""
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    """Mean over rows of the row's token sum."""
    CONSTANT = "constant"
    """Σ / (rows · `constant_length`): no length bias (Dr. GRPO)."""


class KlEstimator(StrEnum):
    """Estimators of KL(policy ‖ reference) from x = l_ref − l. Schulman 2020, "Approximating KL divergence".

    In a loss, the gradient of k1 has expectation 0 and that of k3 is of the forward KL; only k2's is the
    gradient of this KL (on-policy). x is clamped to ±20 and k3 to at most 10.
    """

    K1 = "k1"
    """−x."""
    K2 = "k2"
    """x² / 2."""
    K3 = "k3"
    """e^x − 1 − x."""


class KlReference(StrEnum):
    """Whose log-probs the KL term compares with."""

    BEHAVIOR = "behavior"
    """The sampler's; no other model is needed."""
    MODEL = "model"
    """A frozen model's, passed to the step; costs one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlSettings:
    """A KL term in the loss: coefficient · estimate, aggregated as the policy loss is."""

    coefficient: float
    estimator: KlEstimator = KlEstimator.K3
    reference: KlReference = KlReference.BEHAVIOR

    def __post_init__(self) -> None:
        _require(
            self.coefficient > 0,
            f"KL coefficient {self.coefficient} must be above 0; leave kl unset for none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """A whole policy loss. The default is M2PO against the behaviour log-probs, averaged over tokens."""

    anchor: Anchor = BehaviorAnchor()
    trust_region: TrustRegion = M2po()
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int = 1
    """L of `Aggregation.CONSTANT`: the longest completion allowed, in tokens."""
    kl: KlSettings | None = None

    def __post_init__(self) -> None:
        _require(self.constant_length >= 1, f"constant_length {self.constant_length} must be at least 1")
        _require(
            not (isinstance(self.anchor, ProximalAnchor) and self.needs_step_bounds),
            "the second-moment forms bound the distance to the behaviour policy; with one optimizer step per "
            "batch the ratio to a proximal anchor is 1 and they would never bind. Use the behaviour anchor",
        )

    @property
    def needs_step_bounds(self) -> bool:
        """Whether the trust region depends on the log-probs of all tokens of the step."""
        return isinstance(self.trust_region, M2po | M2poClip | M2poMask)
