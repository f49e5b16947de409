"""How rewards become advantages: which rows are compared, what is subtracted, what the difference is divided by.

Each preset is a frozen class whose docstring gives its formula and source; any of its keys can be changed. What
cannot mean anything is refused here. `trainer.algorithm.advantage` and `roles.NAME.advantage` of a recipe, the
trainer's `step/advantages.py` and docs/roles.md use these classes. r is a reward, A an advantage.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.section import Kind, Section


class GroupBy(StrEnum):
    """What rows of one group have in common."""

    TASK = "task"
    """The task: one prompt, or one start of an environment."""
    ROLE = "role"
    """The role; a policy may play several."""
    EPISODE = "episode"
    """The episode, one run of a task's workflow; implies the task."""
    TURN = "turn"
    """Position among the trajectories of one episode and role, from 0."""
    SOURCE = "source"
    """What the data set says a task is from: an environment, a subset."""


class Baseline(StrEnum):
    """What is subtracted from a reward."""

    NONE = "none"
    OWN = "own"
    """The reward itself: rewards count nothing."""
    GROUP = "group"
    """The group's mean."""
    BATCH = "batch"
    """The mean of the batch's rewards, those of all roles with the same settings."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean of the group's other members."""
    LENGTH_WEIGHTED = "length_weighted"
    """The group's mean, each reward weighted by the row's trained tokens."""
    RUNNING = "running"
    """A moving average of the rewards of the group in earlier steps, kept in checkpoints; 0 at first."""


class Scale(StrEnum):
    """What a centred reward is divided by."""

    NONE = "none"
    GROUP = "group"
    """The group's standard deviation; 1 where it is 0 or the group has one member."""
    GROUP_MEAN = "group_mean"
    """The size of the group's mean reward; 1 where its rewards are all equal."""
    BATCH = "batch"
    """The standard deviation of the batch's rewards, those of all roles with the same settings; 1 where it is 0."""


class Singleton(StrEnum):
    """The advantage of a group of one, before scaling, where its baseline is `group` or `leave_one_out`."""

    ZERO = "zero"
    """0: nothing to compare with, nothing is learnt."""
    REWARD = "reward"
    """Its reward, as if the mean of the others were 0."""


class Shaping(StrEnum):
    """What is added to a reward R, with Q the mean reward of the group's earlier turns in the same episode."""

    NONE = "none"
    MARGIN = "margin"
    """weight · (R − Q)."""
    QUALITY = "quality"
    """weight · (Q·R − (1 − Q)·(1 − R)); for rewards in [0, 1]."""


class AdvantageSettings(Kind):
    """A = (r − baseline) / (scale + eps); the subclasses are published forms of it.

    Roles of one policy with equal settings are computed together, so a group without `role` has rows of all of them.
    """

    group_by: tuple[GroupBy, ...] = (GroupBy.TASK, GroupBy.ROLE)
    """What the rows of a group have in common, besides their policy; empty: all rows are one group."""
    min_rows: int = Field(default=1, ge=1, le=65_536)
    """With `episode` in group_by: the rows of smaller groups are put together per task instead."""
    per_episode: bool = False
    """Compare episodes: each row of a group counts with the mean reward of its episode's rows there, and each episode
    counts once in means and deviations.
    """
    singleton: Singleton = Singleton.ZERO
    """What a group of one gets."""
    baseline: Baseline = Baseline.GROUP
    """What is subtracted."""
    decay: float = Field(default=0.95, gt=0, lt=1)
    """Of a running baseline, per row."""
    scale: Scale = Scale.GROUP
    """What the difference is divided by."""
    unbiased: bool = True
    """Divide the sum of squares by n − 1 (true) or n (false)."""
    eps: float = Field(default=1e-4, ge=0, le=1)
    """Added to the standard deviation."""
    shaping: Shaping = Shaping.NONE
    """What is added to the reward of a later turn before anything else."""
    shaping_weight: float = Field(default=0.5, ge=0, le=1000)
    """Weight of `shaping`."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of a token's return, for each token that the end is away. Tokens that others wrote do not count."""
    whiten: bool = False
    """Give the tokens of all rows with these settings mean 0 and variance 1. A KL term in the reward then makes returns
    of single tokens, as with a discount.
    """

    @property
    def by_token(self) -> bool:
        """Whether tokens of a row differ in their advantages."""
        return self.whiten or self.discount < 1 or self.needs_critic

    @property
    def needs_critic(self) -> bool:
        """Whether tokens are held against what a critic expects of them."""
        return False

    @model_validator(mode="after")
    def _makes_sense(self) -> AdvantageSettings:
        names = [part.value for part in self.group_by]
        if len(set(names)) != len(names):
            raise ValueError(f"group_by {names} names a part twice; name each once")
        by_episode = GroupBy.EPISODE in self.group_by
        if self.min_rows > 1 and not by_episode:
            raise ValueError(
                f"min_rows {self.min_rows} is for groups by episode; add `episode` to group_by {names}, or leave it out"
            )
        if self.per_episode and by_episode:
            raise ValueError(
                "per_episode compares episodes, and groups by episode hold one each; take `episode` from group_by "
                f"{names}, or set per_episode to false"
            )
        if self.per_episode and self.baseline is Baseline.LENGTH_WEIGHTED:
            raise ValueError(
                "per_episode compares episodes, and baseline length_weighted weighs rows by their lengths; set "
                "per_episode to false, or take another baseline"
            )
        if self.shaping is not Shaping.NONE and GroupBy.TURN in self.group_by:
            raise ValueError(
                f"shaping {self.shaping.value} compares turns, and group_by {names} keeps them apart; take `turn` from "
                "it, or set shaping to none"
            )
        if self.baseline is Baseline.RUNNING and (
            GroupBy.ROLE not in self.group_by or by_episode or GroupBy.TASK in self.group_by
        ):
            raise ValueError(
                f"group_by is {names}, but a running baseline lasts longer than a task and belongs to a role: "
                "give `role`, and `source` or `turn` with it, for example [source, role]"
            )
        return self

    def is_zero(self, reward: float, *, num_rows: int) -> bool:
        """Whether `num_rows` rows of one task and role that all earn `reward` get 0, whatever else is in their batch.

        False where that depends on other rows, or on the turns and episodes that these are of.
        """
        if (
            self.whiten
            or self.needs_critic
            or self.baseline is Baseline.OWN
            or (self.shaping is Shaping.QUALITY and num_rows > 1)
        ):
            return False
        if self.baseline is Baseline.NONE:
            return reward == 0
        parts = set(self.group_by)
        if self.baseline in (Baseline.BATCH, Baseline.RUNNING) or GroupBy.ROLE not in parts:
            return False
        if not parts & {GroupBy.TASK, GroupBy.EPISODE}:
            return False
        may_be_alone = num_rows == 1 or self.per_episode or bool(parts & {GroupBy.EPISODE, GroupBy.TURN})
        return reward == 0 or self.singleton is Singleton.ZERO or not may_be_alone


class Grpo(AdvantageSettings):
    """A = (r − mean_g) / (std_g + eps). DeepSeekMath, arXiv 2402.03300, section 4.1.2, with the n − 1 standard
    deviation.
    """

    kind: Literal["grpo"] = "grpo"


class DrGrpo(AdvantageSettings):
    """A = r − mean_g. "Understanding R1-Zero-like training", arXiv 2503.20783; use with constant aggregation."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    scale: Scale = Scale.NONE
    """What the difference is divided by."""


class Rloo(AdvantageSettings):
    """A = r − mean of the others = G / (G − 1) · (r − mean_g). "Back to basics", arXiv 2402.14740."""

    kind: Literal["rloo"] = "rloo"
    baseline: Baseline = Baseline.LEAVE_ONE_OUT
    """What is subtracted."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""
    singleton: Singleton = Singleton.REWARD
    """What a group of one gets."""


class Reinforce(AdvantageSettings):
    """A = r. For a role whose rewards are centred already, such as a judge that earns 1 or −1."""

    kind: Literal["reinforce"] = "reinforce"
    baseline: Baseline = Baseline.NONE
    """What is subtracted."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""


class NoReward(AdvantageSettings):
    """A = 0: rewards count nothing. For on-policy distillation, whose signal is a KL term."""

    kind: Literal["none"] = "none"
    baseline: Baseline = Baseline.OWN
    """What is subtracted."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""


class ReinforcePp(AdvantageSettings):
    """Returns of tokens, Σ over later ones of discount^k · (reward at the end − KL in the reward), whitened over the
    tokens of the batch. REINFORCE++, arXiv 2501.03262.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Baseline = Baseline.NONE
    """What is subtracted."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""
    whiten: bool = True
    """Give the tokens of all rows with these settings mean 0 and variance 1. A KL term in the reward then makes returns
    of single tokens, as with a discount.
    """


class ReinforcePpBaseline(ReinforcePp):
    """The same of r − mean_g: REINFORCE++-baseline."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"  # type: ignore[assignment]
    baseline: Baseline = Baseline.GROUP
    """What is subtracted."""


class Gae(AdvantageSettings):
    """A_t = Σ over k ≥ t of (discount · lam)^(k − t) · δ_k with δ_k = r_k + discount · V_{k+1} − V_k, whitened over the
    tokens of the batch. Generalised advantage estimation, arXiv 1506.02438, equation 16, with a critic.

    r_k is the row's reward at its last token, less the token's KL in the reward; V_k what the critic expects before
    token k, 0 after the last one. Only trained tokens count: the last of a turn is followed by the first of the next,
    whose V has read what the environment said between them. The critic learns A_t + V_t, before whitening.
    """

    kind: Literal["gae"] = "gae"
    baseline: Baseline = Baseline.NONE
    """What is subtracted."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""
    whiten: bool = True
    """Give the tokens of all rows with these settings mean 0 and variance 1. A KL term in the reward then makes returns
    of single tokens, as with a discount.
    """
    lam: float = Field(default=0.95, ge=0, le=1)
    """λ: 1 trusts what was earned, 0 what the critic expects of the next token."""

    @property
    def needs_critic(self) -> bool:
        """Whether tokens are held against what a critic expects of them."""
        return True

    @model_validator(mode="after")
    def _compares_with_the_critic_alone(self) -> Gae:
        if self.baseline is not Baseline.NONE or self.scale is not Scale.NONE:
            raise ValueError(
                f"gae has baseline {self.baseline.value} and scale {self.scale.value}, and its baseline is the critic; "
                "take `baseline` and `scale` from it, or use `reinforce_pp_baseline`, which needs no critic"
            )
        return self


class MaxRl(AdvantageSettings):
    """A = (r − mean_g) / mean_g, for rewards of at least 0. Maximum-likelihood RL, arXiv 2602.02710."""

    kind: Literal["maxrl"] = "maxrl"
    scale: Scale = Scale.GROUP_MEAN
    """What the difference is divided by."""
    eps: float = Field(default=0.0, ge=0, le=1)
    """Added to the mean."""


class Opo(AdvantageSettings):
    """A = r − Σ T·r / Σ T over the group, T trained tokens of a row: the baseline of least variance. OPO, arXiv
    2505.23585.
    """

    kind: Literal["opo"] = "opo"
    baseline: Baseline = Baseline.LENGTH_WEIGHTED
    """What is subtracted."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""


class DrMas(AdvantageSettings):
    """GRPO per task and role, each trajectory a sample; a group of one gets its reward. Dr. MAS."""

    kind: Literal["dr_mas"] = "dr_mas"
    singleton: Singleton = Singleton.REWARD
    """What a group of one gets."""
    eps: float = Field(default=1e-6, ge=0, le=1)
    """Added to the standard deviation."""


class Joint(AdvantageSettings):
    """GRPO per task over the episodes' mean rewards, all roles of the policy together: the baseline of Dr. MAS."""

    kind: Literal["joint"] = "joint"
    group_by: tuple[GroupBy, ...] = (GroupBy.TASK,)
    """What the rows of a group have in common, besides their policy; empty: all rows are one group."""
    per_episode: bool = True
    """Compare episodes: each row of a group counts with the mean reward of its episode's rows there, and each episode
    counts once in means and deviations.
    """
    singleton: Singleton = Singleton.REWARD
    """What a group of one gets."""
    eps: float = Field(default=1e-6, ge=0, le=1)
    """Added to the standard deviation."""


class AtGrpo(AdvantageSettings):
    """A = r − mean_g per task, turn and role. AT-GRPO of PettingLLMs; its mix of team and own reward is up to the
    workflow.
    """

    kind: Literal["at_grpo"] = "at_grpo"
    group_by: tuple[GroupBy, ...] = (GroupBy.TASK, GroupBy.TURN, GroupBy.ROLE)
    """What the rows of a group have in common, besides their policy; empty: all rows are one group."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""


class DesignerExecutor(AdvantageSettings):
    """GRPO of executors of one design, where a design is an episode; with at most two, and for designers, per task."""

    kind: Literal["designer_executor"] = "designer_executor"
    group_by: tuple[GroupBy, ...] = (GroupBy.EPISODE, GroupBy.ROLE)
    """What the rows of a group have in common, besides their policy; empty: all rows are one group."""
    min_rows: int = Field(default=3, ge=1, le=65_536)
    """With `episode` in group_by: the rows of smaller groups are put together per task instead."""


class Hierarchical(AdvantageSettings):
    """A = r − mean_g among the rows of one episode and role: solvers of one proposal. prime-rl; the proposer takes
    `dr_grpo`.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    group_by: tuple[GroupBy, ...] = (GroupBy.EPISODE, GroupBy.ROLE)
    """What the rows of a group have in common, besides their policy; empty: all rows are one group."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""


class Rae(AdvantageSettings):
    """A = r − b, then b ← decay·b + (1 − decay)·r, with a b for each source and role. SPIRAL, arXiv 2506.24119.

    Rows of one step see the same b: n of them with mean m make it decay^n·b + (1 − decay^n)·m, in whatever order.
    """

    kind: Literal["rae"] = "rae"
    group_by: tuple[GroupBy, ...] = (GroupBy.SOURCE, GroupBy.ROLE)
    """What the rows of a group have in common, besides their policy; empty: all rows are one group."""
    baseline: Baseline = Baseline.RUNNING
    """What is subtracted."""
    scale: Scale = Scale.NONE
    """What the difference is divided by."""


class Margin(AdvantageSettings):
    """GRPO of R + weight · (R − Q), Q the mean reward of the earlier turns: a turn earns by improving. MARTI."""

    kind: Literal["margin"] = "margin"
    shaping: Shaping = Shaping.MARGIN
    """What is added to the reward of a later turn before anything else."""
    eps: float = Field(default=1e-9, ge=0, le=1)
    """Added to the standard deviation."""


class Quality(AdvantageSettings):
    """GRPO of R + weight · (Q·R − (1 − Q)·(1 − R)), Q the mean reward of the earlier turns. MARTI."""

    kind: Literal["quality"] = "quality"
    shaping: Shaping = Shaping.QUALITY
    """What is added to the reward of a later turn before anything else."""
    eps: float = Field(default=1e-9, ge=0, le=1)
    """Added to the standard deviation."""


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


class CriticSettings(Section):
    """A critic for advantage `gae`: the policy's initial model with a head of one number, trained beside the policy by
    the same optimizer with a learning rate of its own, in the same minibatches and epochs, before the policy.

    Its loss is ½ · max((V − R)², (clip(V, V_s − clip, V_s + clip) − R)²), R the return and V_s the value at the start
    of the step: the mean over trained tokens. PPO's clipped value loss, as in arXiv 2005.12729, section 3.
    """

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """The peak; warm-up, schedule and the rest are the policy's."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from that of the step's start before its loss stops falling; null: any way."""
    warmup: int = Field(default=0, ge=0, le=1_000_000)
    """First steps in which only the critic learns; counted by its updates, minibatches · epochs a step."""


AnyAdvantage: TypeAlias = (
    Grpo
    | DrGrpo
    | Rloo
    | Reinforce
    | NoReward
    | ReinforcePp
    | ReinforcePpBaseline
    | Gae
    | MaxRl
    | Opo
    | DrMas
    | Joint
    | AtGrpo
    | DesignerExecutor
    | Hierarchical
    | Rae
    | Margin
    | Quality
)


def require_critic(
    advantages: Iterable[AnyAdvantage | PluginSettings], *, critic: CriticSettings | None
) -> None:
    """Raise ValueError unless all advantages of a policy compare with the critic, or none where there is none."""
    for given in advantages:
        name = given.use if isinstance(given, PluginSettings) else given.kind
        needs = not isinstance(given, PluginSettings) and given.needs_critic
        if needs and critic is None:
            raise ValueError(
                f"advantage {name} compares with a critic, and there is none; add `critic: {{}}` to the algorithm"
            )
        if not needs and critic is not None:
            raise ValueError(
                f"a critic is trained for advantage gae, and advantage {name} does not use it; give gae to the "
                "policy and to all of its roles, or take `critic` away (`critic: null`)"
            )
