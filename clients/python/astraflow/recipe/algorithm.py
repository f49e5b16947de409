"""What a step optimises: advantage × loss × ratio anchor × aggregation × optional KL term.

Each part is a frozen class whose docstring gives its formula and source and whose defaults are the published ones;
any combination that makes sense can be built, and one that does not is refused here, before training starts. The
recipe's `trainer.algorithm`, the trainer's kernel and docs/trainer.md all use these classes. No torch in here.
Symbols, per trained token: l the log-prob under the weights being trained, l_a under the anchor, r = exp(l − l_a)
(log-ratio clamped to ±20), A the advantage, sg[·] a value without gradient.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from astraflow.recipe.advantage import AnyAdvantage, Grpo
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.section import BY_KIND, Kind, Section

REPLACED_KEYS = {
    key: f"a loss has its own settings now; write for example `loss: {{kind: {example}}}`"
    for key, example in {
        "m2_budget": "m2po, budget: 0.04",
        "clip_low": "ppo_clip, low: 0.2",
        "clip_high": "ppo_clip, high: 0.28",
    }.items()
}
"""Keys of `algorithm` that earlier releases had, and what to write instead."""


class NoTrustRegion(Kind):
    """−r·A: plain importance weighting."""

    kind: Literal["none"] = "none"


class PpoClip(Kind):
    """max(−r·A, −clip(r, 1 − low, 1 + high)·A). PPO, arXiv 1707.06347; the wider upper bound is DAPO's,
    2503.14476.
    """

    kind: Literal["ppo_clip"] = "ppo_clip"
    low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is at least 1 − low."""
    high: float = Field(default=0.28, ge=0)
    """The ratio is at most 1 + high."""


class DualClip(Kind):
    """PPO clip, and for A < 0 at most cap·|A|. arXiv 1912.09729: bounds the push away from a token that
    became likely.
    """

    kind: Literal["dual_clip"] = "dual_clip"
    low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is at least 1 − low."""
    high: float = Field(default=0.28, ge=0)
    """The ratio is at most 1 + high."""
    cap: float = Field(default=3.0, gt=1)
    """Bound of the loss for A < 0, in |A|."""


class M2po(Kind):
    """PPO clip whose bounds come from a second-moment budget over the whole step: the M2PO authors' published
    form.

    Over the tokens that move away from the anchor (A > 0 and r > 1, or A < 0 and r < 1), with d = l − l_a: if
    the mean of d² exceeds `budget`, find t such that the mean of min(d², t²) equals `budget` (water-filling)
    and clip with low = max(1 − e^−t, floor_low), high = max(e^t − 1, floor_high); else do not clip.
    "Prosperity before collapse", arXiv 2510.01161, code Infini-AI-Lab/M2PO (which rounds t down to the next
    smaller |d|; we keep the exact t).
    """

    kind: Literal["m2po"] = "m2po"
    budget: float = Field(default=0.04, gt=0, le=100)
    """Second moment allowed."""
    floor_low: float = Field(default=0.3, ge=0, le=1)
    """The lower bound is never tighter."""
    floor_high: float = Field(default=0.5, ge=0)
    """The upper bound is never tighter."""


class M2poClip(Kind):
    """The form of the published AstraFlow code: same tokens, bound from the sorted suffix, and no floor.

    With d² sorted descending, k = the first index whose suffix mean falls below `budget` (the last one if
    none does), t = sqrt(d²_k): low = min(1 − e^−t, cap_low), high = min(e^t − 1, cap_high); the caps alone
    when the mean of d² is within the budget. There it is computed per micro-batch, here over the whole step.
    """

    kind: Literal["m2po_clip"] = "m2po_clip"
    budget: float = Field(default=0.01, gt=0, le=100)
    """Second moment allowed."""
    cap_low: float = Field(default=0.95, ge=0, le=1)
    """The lower bound is never wider."""
    cap_high: float = Field(default=20.0, ge=0)
    """The upper bound is never wider."""


class M2poMask(Kind):
    """−r·A·M, where M drops the tokens of largest d² (both sides) until the mean of the rest is below
    `budget`.

    The form of AReaL. It also drops tokens that would restore the policy, so drift has no counter-force: a
    run whose `masked_fraction` exceeds 0.1 should change to M2po. The denominator keeps counting dropped
    tokens.
    """

    kind: Literal["m2po_mask"] = "m2po_mask"
    budget: float = Field(default=0.04, gt=0, le=100)
    """Second moment allowed."""


class Gspo(Kind):
    """PPO clip of the sequence ratio s = exp(mean over the row of l − l_a), as s_t = sg[s]·exp(l − sg[l]).

    GSPO-token, arXiv 2507.18071, section 4.3; log s is clamped to at most 10. Use with seq_mean_token_mean.
    """

    kind: Literal["gspo"] = "gspo"
    low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence ratio is at least 1 − low."""
    high: float = Field(default=4e-4, ge=0)
    """The sequence ratio is at most 1 + high."""


class Cispo(Kind):
    """−sg[clip(r, min_ratio, max_ratio)]·A·l: clipped tokens keep their gradient. MiniMax-M1, arXiv
    2506.13585.

    The defaults are ScaleRL's (arXiv 2510.13786): no lower bound, ratio at most 5.
    """

    kind: Literal["cispo"] = "cispo"
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Smallest weight."""
    max_ratio: float = Field(default=5.0, ge=1)
    """Largest weight."""


class BehaviorAnchor(Kind):
    """l_a = l_mu: the ratio is taken to what the sampler reported. One pass, no recomputation."""

    kind: Literal["behavior"] = "behavior"


class ProximalAnchor(Kind):
    """l_a = l_prox, recomputed at the start of the step; each token weighted by sg[min(exp(l_prox − l_mu),
    weight_cap)].

    Decoupled PPO, arXiv 2110.00641 and AReaL arXiv 2505.24298; the bounded weight is truncated importance
    sampling (TIS, token level). Costs one more forward pass when a step has several micro-batches.
    """

    kind: Literal["proximal"] = "proximal"
    weight_cap: float = Field(default=2.0, gt=0)
    """Largest weight."""


class TokenMean(Kind):
    """Σ / trained tokens of the step (DAPO)."""

    kind: Literal["token_mean"] = "token_mean"


class SeqMeanTokenMean(Kind):
    """Mean over rows of the row's token mean (GRPO)."""

    kind: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"


class SeqMeanTokenSum(Kind):
    """Mean over rows of the row's token sum."""

    kind: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"


class Constant(Kind):
    """Σ / (rows · length): no length bias (Dr. GRPO)."""

    kind: Literal["constant"] = "constant"
    length: int = Field(ge=1)
    """The longest completion allowed, in tokens."""


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
    """The policy's initial model, kept frozen; costs its memory and one forward pass."""


class KlSettings(Section):
    """A KL term in the loss: coefficient · estimate, aggregated as the policy loss is."""

    coefficient: float = Field(gt=0, le=1000)
    """Weight of the term; leave `kl` unset for none."""
    estimator: KlEstimator = KlEstimator.K3
    """k1, k2 or k3; how their gradients differ: docs/trainer.md."""
    reference: KlReference = KlReference.BEHAVIOR
    """`behavior`, the sampler, or `model`, the policy's initial model."""


class AgreementSettings(Section):
    """Rows on which trainer and engine disagree are left out: those whose mean of r − 1 − log r over their trained
    tokens, r to the engine's log-probs, exceeds a bound. It is what staleness and engine add up to, as `mismatch_kl`.
    """

    max_kl: float = Field(default=0.1, gt=0, le=10)
    """Largest mean of a row. The denominators keep counting its tokens."""


class OverlongSettings(Section):
    """A penalty for long answers, added to a row's reward before advantages are computed. With n its generated tokens:
    0 for n ≤ max_tokens − buffer_tokens; −factor·(n − (max_tokens − buffer_tokens)) / buffer_tokens up to max_tokens;
    −factor beyond. "Soft overlong punishment", DAPO, arXiv 2503.14476, equation 13 (16,384 + 4,096 tokens there).
    """

    max_tokens: int = Field(ge=1, le=1_048_576)
    """From this length on the penalty is whole: where answers are cut off, as a rule."""
    buffer_tokens: int = Field(ge=1, le=1_048_576)
    """Length over which it grows; at most max_tokens."""
    factor: float = Field(default=1.0, gt=0, le=1000)
    """The whole penalty."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongSettings:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} exceeds max_tokens {self.max_tokens}: empty answers would be "
                "penalised; lower it"
            )
        return self


LossSettings: TypeAlias = NoTrustRegion | PpoClip | DualClip | M2po | M2poClip | M2poMask | Gspo | Cispo
Anchor: TypeAlias = BehaviorAnchor | ProximalAnchor
Aggregation: TypeAlias = TokenMean | SeqMeanTokenMean | SeqMeanTokenSum | Constant

_STEP_WIDE = (M2po, M2poClip, M2poMask)


class StaleTokenSettings(Section):
    """What becomes of tokens of versions that `max_staleness` does not allow, when their batch is bound."""

    correction: Literal["mask", "reweight"]
    """`mask` leaves them out of the loss. A group is dropped when one of its trajectories has no newer token.
    `reweight` multiplies the loss of each by `decay` to the power of the versions beyond `max_staleness`. A group is
    dropped when a token is more than `max_excess` versions beyond it.
    """
    decay: float = Field(default=0.5, gt=0, lt=1)
    """Of `reweight`."""
    max_excess: int = Field(default=4, ge=1, le=1024)
    """Of `reweight`, in versions."""


class AlgorithmSettings(Section):
    """Advantage and loss. The default is M2PO against the behaviour log-probs, averaged over tokens."""

    advantage: Annotated[AnyAdvantage | PluginSettings, BY_KIND] = Grpo()
    """Groups, baseline and scale, or an `Advantage` plug-in; `roles.NAME.advantage` replaces it for one role."""
    loss: Annotated[LossSettings | PluginSettings, BY_KIND] = M2po()
    """Loss of a token: the trust region around the anchor, or a `Loss` plug-in. A bare name takes its published
    defaults.
    """
    anchor: Annotated[Anchor, BY_KIND] = BehaviorAnchor()
    """What ratios are taken to."""
    aggregation: Annotated[Aggregation, BY_KIND] = TokenMean()
    """How token losses become one number: a sum of weight · loss."""
    kl: KlSettings | None = None
    """A KL term in the loss."""
    agreement: AgreementSettings | None = None
    """Leave out rows on which trainer and engine disagree; unset: none."""
    truncated: Literal["train", "mask"] = "train"
    """Rows whose last answer a limit of tokens cut off. `mask` leaves them out of the step and of its denominators
    (DAPO's overlong filtering); their rewards still count in the baselines of their groups.
    """
    overlong: OverlongSettings | None = None
    """A penalty for long answers, in the reward; unset: none."""
    drop_zero_advantage: bool = True
    """Leave rows whose advantage is exactly 0 out of the step and of its denominators, as dynamic sampling does. They
    are kept when a KL term gives them a gradient.
    """

    @property
    def needs_step_bounds(self) -> bool:
        """Whether the trust region depends on the log-probs of all tokens of the step."""
        return isinstance(self.loss, _STEP_WIDE)

    def require_consistent(self) -> None:
        """Raise ValueError for parts that do not go together. Not a validator: a policy's own settings are partial."""
        if isinstance(self.anchor, ProximalAnchor) and isinstance(self.loss, _STEP_WIDE):
            raise ValueError(
                f"{self.loss.kind} bounds the distance to the behaviour policy; with one optimizer step per batch the "
                "ratio to a proximal anchor is 1 and it would never bind. Use the behaviour anchor, or another loss"
            )
