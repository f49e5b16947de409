"""What a step optimises: advantage × loss × ratio anchor × mismatch correction × aggregation, and terms beside it.

Each part is a frozen class whose docstring gives its formula and source and whose defaults are the published ones;
any combination that makes sense can be built, and one that does not is refused here, before training starts. The
recipe's `trainer.algorithm`, the trainer's kernel and docs/trainer.md all use these classes. No torch in here.
Symbols, per trained token: l the log-prob under the weights being trained, l_a under the anchor, r = exp(l − l_a)
(log-ratio clamped to ±20), l_mu what the sampler reported, l_s under the weights at the start of the step (where
nothing recomputes them, sg[l]), A the advantage, sg[·] a value without gradient.
"""

import difflib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from astraflow.recipe.advantage import AnyAdvantage, CriticSettings, Grpo, OverlongSettings, require_critic
from astraflow.recipe.model import ReferenceModel
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.section import BY_KIND, Kind, Section

REPLACED_KEYS = {
    key: f"this moved; write for example `{example}`"
    for key, example in {
        "m2_budget": "loss: {kind: m2po, budget: 0.04}",
        "clip_low": "loss: {kind: ppo_clip, low: 0.2}",
        "clip_high": "loss: {kind: ppo_clip, high: 0.28}",
        "weight_cap": "mismatch: {weight: {kind: tis, cap: 2.0}}",
        "agreement": "mismatch: {reject: {kind: kl, max: 0.1}}",
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


class Gmpo(Kind):
    """−s·A with s = exp(mean over the row of l − l_a), each difference cut before where it moves away: at most `high`
    for A > 0, at least −`low` for A < 0. GMPO, arXiv 2507.20673. Use with seq_mean_token_mean.
    """

    kind: Literal["gmpo"] = "gmpo"
    low: float = Field(default=0.4, ge=0)
    """Bound of the log-ratio of a token with A < 0."""
    high: float = Field(default=0.4, ge=0)
    """Bound of the log-ratio of a token with A > 0."""


class Sapo(Kind):
    """−(4 / τ)·sigmoid(τ·(r − 1))·A: a gate that closes softly. τ differs by the sign of A. SAPO, arXiv 2511.20347."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """τ where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """τ elsewhere; larger closes sooner."""


class Dppo(Kind):
    """−r·A without the tokens whose probability moved too far: A > 0 and e^l − e^l_mu > high, or A < 0 and
    e^l_mu − e^l > low. DPPO, binary total variation, in the form of prime-rl; the denominator keeps counting them.
    """

    kind: Literal["dppo"] = "dppo"
    low: float = Field(default=0.2, ge=0, le=1)
    """Probability that may be lost."""
    high: float = Field(default=0.2, ge=0, le=1)
    """Probability that may be gained."""


class Sft(Kind):
    """−l: cross-entropy on completions, whoever wrote them; advantages and what the sampler reported count nothing."""

    kind: Literal["sft"] = "sft"


class BehaviorAnchor(Kind):
    """l_a = l_mu: the ratio is taken to what the sampler reported. One pass, no recomputation (verl's `bypass_mode`
    with its PPO loss).
    """

    kind: Literal["behavior"] = "behavior"


class ProximalAnchor(Kind):
    """l_a = l_s, recomputed at the start of the step. Decoupled PPO, arXiv 2110.00641 and AReaL arXiv 2505.24298.

    Costs one more forward pass when a step has several micro-batches. With one update per step r is 1.
    """

    kind: Literal["proximal"] = "proximal"


class BypassAnchor(Kind):
    """l_a = sg[l]: r is 1, and the mismatch weight, exp(sg[l] − l_mu) corrected, is all that weighs a token. No
    recomputation (verl's `bypass_mode` with its REINFORCE loss).
    """

    kind: Literal["bypass"] = "bypass"


class NoWeight(Kind):
    """w = 1."""

    kind: Literal["none"] = "none"


class Tis(Kind):
    """w = min(ρ, cap): truncated importance sampling. Not with the behaviour anchor, where w would be 1."""

    kind: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Whose ratio ρ is: the token's, or the product over its row."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""


class Mis(Kind):
    """w = ρ where low ≤ ρ ≤ cap, else 0: masked importance sampling, TRL's `sequence_mask`."""

    kind: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = "sequence"
    """Whose ratio ρ is: the token's, or the product over its row."""
    low: float = Field(default=0.0, ge=0)
    """Smallest ratio that counts."""
    cap: float = Field(default=3.0, gt=0)
    """Largest ratio that counts."""


class IcePop(Kind):
    """w = ρ of the token where low ≤ ρ ≤ high, else 0. Ling 2.0, arXiv 2510.18855."""

    kind: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, ge=0)
    """Smallest ratio that counts."""
    high: float = Field(default=5.0, gt=0)
    """Largest ratio that counts."""


class GeometricReject(Kind):
    """Rows whose exp(mean of l_s − l_mu) is outside [low, high]."""

    kind: Literal["geometric"] = "geometric"
    low: float = Field(default=0.99, ge=0)
    """Smallest mean."""
    high: float = Field(default=1.01, gt=0)
    """Largest mean."""


class KlReject(Kind):
    """Rows, or tokens, whose |estimate of KL(sampler ‖ l_s)| exceeds a bound; verl's `token_k1`, `seq_mean_k3`, ….

    With d = l_s − l_mu: k1 = −d, k2 = d² / 2, k3 = e^d − 1 − d.
    """

    kind: Literal["kl"] = "kl"
    over: Literal["token", "mean", "max", "sum"] = "mean"
    """What is held against the bound: each token for itself, or a number of its row."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """As above."""
    max: float = Field(default=0.1, gt=0)
    """The bound."""


class VetoSettings(Section):
    """Rows are left out when the ratio exp(l_s − l_mu) of one of their tokens is outside [low, high]."""

    low: float = Field(default=1e-4, ge=0)
    """Smallest ratio."""
    high: float = Field(default=100.0, gt=0)
    """Largest ratio."""


AnyWeight: TypeAlias = NoWeight | Tis | Mis | IcePop
AnyReject: TypeAlias = GeometricReject | KlReject


class MismatchSettings(Section):
    """What corrects for the sampler not having been the policy at the start of the step: another engine's arithmetic,
    older weights. It goes with any anchor and loss; what it leaves out still counts in the denominators.
    """

    weight: Annotated[AnyWeight, BY_KIND] | None = None
    """Factor of a token's loss, without gradient. `mis` and `icepop` judge ρ = exp(l_s − l_mu); what they let through
    has the weight exp(l_a − l_mu), which is 1 for the behaviour anchor: its r holds it already. Unset: `tis` for the
    other anchors, `none` for that one.
    """
    reject: Annotated[AnyReject, BY_KIND] | None = None
    """Leave whole rows, or tokens, out."""
    veto: VetoSettings | None = None
    """Leave out rows with a single token that is far off."""


class TokenMean(Kind):
    """Σ / trained tokens of the step (DAPO)."""

    kind: Literal["token_mean"] = "token_mean"


class SeqMeanTokenMean(Kind):
    """Mean over rows of the row's token mean (GRPO)."""

    kind: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"


class SeqMeanTokenSum(Kind):
    """Mean over rows of the row's token sum."""

    kind: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"


class TokenSum(Kind):
    """Σ: a larger batch is a larger gradient."""

    kind: Literal["token_sum"] = "token_sum"


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
    K3_K2 = "k3_k2"
    """The value of k3 with the gradient of k2, straight through: sg[k3 − k2] + k2."""


class KlReference(StrEnum):
    """Whose log-probs the KL term compares with."""

    BEHAVIOR = "behavior"
    """The sampler's; no other model is needed."""
    MODEL = "model"
    """The policy's initial model, kept frozen; costs its memory and one forward pass."""


class KlSettings(Section):
    """A KL term: coefficient · estimate of KL(policy ‖ reference). With a teacher as its reference, distillation."""

    coefficient: float = Field(gt=0, le=1000)
    """Weight of the term; leave `kl` unset for none."""
    estimator: KlEstimator = KlEstimator.K3
    """k1, k2, k3 or k3_k2; how their gradients differ: docs/trainer.md."""
    reference: KlReference | ReferenceModel = KlReference.BEHAVIOR
    """`behavior`, the sampler; `model`, the policy's initial model; or another model."""
    placement: Literal["loss", "reward", "advantage"] = "loss"
    """`loss`: a term beside the policy's, aggregated as that is. `reward`: a row's reward loses the sum over its
    tokens, or, where advantages are returns of tokens, each token its own. `advantage`: each token's advantage loses
    its own. The latter two are measured once, at the start of the step, and cost a forward pass.
    """

    @property
    def needs_model(self) -> bool:
        """Whether a frozen model is kept beside the policy."""
        return self.reference is not KlReference.BEHAVIOR


class EntropySettings(Section):
    """A bonus for uncertainty: − coefficient · entropy of the next token, aggregated as the policy loss is."""

    coefficient: float = Field(gt=0, le=100)
    """Weight of the term; leave `entropy` unset for none."""


LossSettings: TypeAlias = (
    NoTrustRegion | PpoClip | DualClip | M2po | M2poClip | M2poMask | Gspo | Gmpo | Cispo | Sapo | Dppo | Sft
)
Anchor: TypeAlias = BehaviorAnchor | ProximalAnchor | BypassAnchor
Aggregation: TypeAlias = TokenMean | TokenSum | SeqMeanTokenMean | SeqMeanTokenSum | Constant

_STEP_WIDE = (M2po, M2poClip, M2poMask)
_UNBOUND = NoTrustRegion | Dppo


_PPO = {"kind": "ppo_clip", "low": 0.2, "high": 0.2}
_ROW_MEANS = "seq_mean_token_mean"
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": "grpo",
        "loss": _PPO,
        "aggregation": _ROW_MEANS,
        "kl": {"coefficient": 0.04, "estimator": "k3", "reference": "model"},
    },
    "dr_grpo": {"advantage": "dr_grpo", "loss": _PPO, "aggregation": "constant"},
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "aggregation": "token_mean",
        "overlong": {"max_tokens": 20_480, "buffer_tokens": 4096},
        "drop_zero_advantage": True,
    },
    "rloo": {
        "advantage": "rloo",
        "loss": "none",
        "aggregation": "seq_mean_token_sum",
        "kl": {"coefficient": 0.05, "estimator": "k1", "reference": "model", "placement": "reward"},
    },
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "loss": _PPO,
        "kl": {"coefficient": 0.01, "estimator": "k1", "reference": "model", "placement": "reward"},
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "loss": _PPO,
        "kl": {"coefficient": 1e-5, "estimator": "k2", "reference": "model"},
    },
    "maxrl": {"advantage": "maxrl", "loss": "none"},
    "opo": {"advantage": "opo", "loss": "none"},
    "gspo": {"advantage": "grpo", "loss": "gspo", "aggregation": _ROW_MEANS},
    "gmpo": {"advantage": "grpo", "loss": "gmpo", "aggregation": _ROW_MEANS},
    "cispo": {"advantage": "grpo", "loss": "cispo"},
    "sapo": {"advantage": "grpo", "loss": "sapo", "aggregation": _ROW_MEANS},
    "dppo": {
        "advantage": "dr_grpo",
        "loss": "dppo",
        "kl": {"coefficient": 2e-3, "estimator": "k2", "reference": "behavior"},
    },
    "m2po": {"advantage": "grpo", "loss": "m2po"},
    "ppo": {
        "advantage": "gae",
        "critic": {},
        "loss": _PPO,
        "epochs": 4,
        "kl": {"coefficient": 0.05, "estimator": "k1", "reference": "model", "placement": "reward"},
    },
    "opd": {
        "advantage": "none",
        "loss": "none",
        "kl": {"coefficient": 1.0, "estimator": "k1", "placement": "advantage"},
    },
    "sft": {"advantage": "none", "loss": "sft"},
}
"""Published settings by name. A key that stands beside `preset` replaces the one here."""


class AlgorithmSettings(Section):
    """Advantage and loss. The default is M2PO against the behaviour log-probs, averaged over tokens."""

    preset: str | None = Field(default=None, json_schema_extra={"enum": [*PRESETS, None]})
    """Published settings by name, for the keys that are not given here; `astraflow recipe show` prints them."""
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
    mismatch: MismatchSettings = MismatchSettings()
    """Correction for the sampler not having been the policy at the start of the step."""
    critic: CriticSettings | None = None
    """What advantage `gae` compares with; `{}` for its defaults. Unset: none."""
    entropy: EntropySettings | None = None
    """An entropy bonus in the loss."""
    truncated: Literal["train", "mask"] = "train"
    """Rows whose last answer a limit of tokens cut off. `mask` leaves them out of the step and of its denominators
    (DAPO's overlong filtering); their rewards still count in the baselines of their groups.
    """
    overlong: OverlongSettings | None = None
    """A penalty for long answers, in the reward; unset: none."""
    minibatches: int = Field(default=1, ge=1, le=1024)
    """Updates of the weights in each epoch: the tasks of the batch are spread over so many."""
    epochs: int = Field(default=1, ge=1, le=1024)
    """How often each minibatch is trained on."""
    drop_zero_advantage: bool = True
    """Leave rows whose advantage is exactly 0 out of the step and of its denominators, as dynamic sampling does. They
    are kept when another term gives them a gradient.
    """

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:  # noqa: ANN401 - what a YAML document holds
        """The keys of the preset, under those that are given."""
        name = given.get("preset") if isinstance(given, Mapping) else None
        if name is None:
            return given
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(PRESETS)}"
            raise ValueError(f"unknown preset {name!r}; {hint}")
        expanded = PRESETS[name] | dict(given)
        for key in ("kl", "overlong", "critic"):  # sections, of which single keys are replaced
            if isinstance(expanded.get(key), Mapping):
                expanded[key] = PRESETS[name].get(key, {}) | dict(expanded[key])
        if name == "opd" and "reference" not in expanded["kl"]:
            raise ValueError(
                "preset 'opd' learns from a teacher, which is yours to say: add `kl: {reference: {path: MODEL}}`"
            )
        if expanded.get("aggregation") == "constant":
            raise ValueError(
                f"preset {name!r} divides by the longest completion, which is yours to say: add "
                "`aggregation: {kind: constant, length: N}`, N as sampling.max_new_tokens"
            )
        return expanded

    @property
    def needs_step_bounds(self) -> bool:
        """Whether the trust region depends on the log-probs of all tokens of the step."""
        return isinstance(self.loss, _STEP_WIDE)

    @property
    def mismatch_weight(self) -> AnyWeight:
        """What corrects a token's loss for its sampler, with the anchor's default."""
        default = NoWeight() if isinstance(self.anchor, BehaviorAnchor) else Tis()
        return self.mismatch.weight or default

    @property
    def trains_without_advantage(self) -> bool:
        """Whether rows whose advantage is 0 have a gradient."""
        in_loss = self.kl is not None and self.kl.placement == "loss"
        has_term = in_loss or self.entropy is not None or self.critic is not None
        return has_term or isinstance(self.loss, Sft)

    @property
    def has_kl_outside_the_loss(self) -> bool:
        """Whether rewards or advantages depend on a reference."""
        return self.kl is not None and self.kl.placement != "loss"

    def require_consistent(
        self, *, is_adapter: bool = False, of_roles: Iterable[AnyAdvantage | PluginSettings] = ()
    ) -> None:
        """Raise ValueError for parts that do not go together, the advantages `of_roles` included. Not a validator: a
        policy's own settings are partial.
        """
        require_critic([self.advantage, *of_roles], critic=self.critic)
        anchor, loss, weight = self.anchor, self.loss, self.mismatch_weight
        if (
            is_adapter
            and self.kl
            and isinstance(self.kl.reference, ReferenceModel)
            and not self.kl.reference.path
        ):
            raise ValueError("kl.reference: versions of an adapter are no models; give `path`, or `model`")
        one_update = self.minibatches * self.epochs == 1
        if isinstance(anchor, ProximalAnchor) and isinstance(loss, _STEP_WIDE) and one_update:
            raise ValueError(
                f"{loss.kind} bounds the distance to the anchor; with one update per batch the ratio to a proximal "
                "anchor is 1 and it would never bind. Use the behaviour anchor, or several minibatches or epochs"
            )
        if isinstance(anchor, BypassAnchor) and not isinstance(loss, _UNBOUND | PluginSettings):
            raise ValueError(
                f"the ratio to a bypass anchor is 1, and {loss.kind} would never bind; use `none` or `dppo`, or the "
                "behaviour anchor"
            )
        if isinstance(loss, Sft) and not isinstance(anchor, BehaviorAnchor):
            raise ValueError(f"sft takes no ratio, and anchor {anchor.kind} is for one; leave the anchor out")
        if isinstance(anchor, BehaviorAnchor) and isinstance(weight, Tis):
            raise ValueError(
                "mismatch.weight tis corrects for an anchor that is not the sampler, and the behaviour anchor is: its "
                "ratio holds that weight already. Use the anchor `proximal` or `bypass`, or `mis` or `icepop`, which "
                "also leave tokens out"
            )
