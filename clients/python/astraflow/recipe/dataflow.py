"""What the dataflow server does by a recipe: how tasks become batches, are evaluated and are kept, which is its section
`dataflow`, and how many nodes there should be, `raas.autoscaling`.

What a policy may set for itself is in `BatchSettings`. Invariant: whether a task belongs to the share that the archive
keeps follows from its id alone, so its groups are kept whole.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from astraflow.recipe.groups import BatchNeedsSettings, RouteSettings
from astraflow.recipe.plugin_settings import DataPluginSettings
from astraflow.recipe.section import Section

MAX_EVALUATION_SAMPLES = 1_000_000
"""Of one evaluation: tasks · samples of each."""
DEFAULT_MAX_ABS_REWARD, _MOST_ABS_REWARD = 1e6, 1e9
"""Squares of the latter, a million summed, are far from the end of a float32."""

Kept = Literal[
    "all",
    "trained",
    "dropped",
    "stale",
    "filtered",
    "filter_failed",
    "no_credit",
    "incomplete",
    "expired",
    "run_finished",
    "skipped",
    "voided",
    "quarantined",
    "superseded",
    "fenced",
    "late_closed",
]


class RowLimits(NamedTuple):
    """What a trainer can train on."""

    max_tokens: int
    """Of one row: `trainer.tokens_per_microbatch`, for a row is never cut."""
    vocab_size: int | None
    """Token ids from 0 to this, exclusive; None where only who has the model knows."""
    max_abs_reward: float = DEFAULT_MAX_ABS_REWARD
    """Largest reward or metric."""


class HedgeSettings(Section):
    """Second copies of tasks that take longer than others."""

    quantile: float = Field(default=0.95, ge=0.5, lt=1)
    """Of the time that the newest tasks took: whose lease is older is a straggler."""
    max_share: float = Field(default=0.05, gt=0, le=0.5)
    """Copies at a time, as a share of the leases; one is always allowed."""


class ArchiveSettings(Section):
    """Trajectories that are written to the run's store when their part in the run is over."""

    keep: tuple[Kept, ...] = Field(default=("all",), min_length=1)
    """Which: `all`, `trained`, `dropped`, or single reasons for which trajectories are dropped."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the tasks, chosen by their ids; all groups of a task are kept, or none."""
    write_every_s: float = Field(default=30.0, ge=0.1, le=86_400)
    """Longest time that trajectories wait to be written, while the store takes them."""
    max_waiting_mib: int = Field(default=256, ge=1, le=1_048_576)
    """Redis memory, in MiB, for those that wait; beyond it the oldest are given up and counted."""
    keep_days: float | None = Field(default=None, gt=0, le=100_000)
    """Files older than this are deleted."""
    keep_gib: float | None = Field(default=None, gt=0, le=1e9)
    """The oldest files are deleted while all together are larger than this, in GiB."""
    delete_with_run: bool = False
    """Whether deleting the run deletes its archive."""
    trainer_logprobs: bool = False
    """Whether trainers keep what they made of each token beside what is trained on; 4 bytes a token, compressed."""

    @property
    def reasons(self) -> str:
        """What is kept, as the dataflow server's functions read it: `dropped` is all but `trained`."""
        return " ".join("trained dropped" if name == "all" else name for name in self.keep)

    def has_task(self, task_id: str) -> bool:
        """Whether a task is in the share; the dataflow server's functions find the same."""
        return (
            int(hashlib.sha1(task_id.encode(), usedforsecurity=False).hexdigest()[:8], 16)
            < self.share * 2**32
        )

    @model_validator(mode="after")
    def _logprobs_belong_to_samples(self) -> ArchiveSettings:
        if self.trainer_logprobs and not {"all", "trained"} & set(self.keep):
            raise ValueError(
                f"trainer_logprobs are kept beside what was trained on, and keep is {list(self.keep)}; add `trained` "
                "to it, or leave trainer_logprobs out"
            )
        return self


class EvaluationSettings(Section):
    """Held-out evaluation by the same nodes, at exact versions."""

    every_versions: int = Field(default=10, ge=0)
    """Evaluate all policies whenever one has announced another multiple of this; 0: first and final version only."""
    num_samples: int = Field(default=256, ge=1, le=1_000_000)
    """Held-out tasks of a periodic evaluation."""
    final_samples: int = Field(default=1024, ge=1, le=1_000_000)
    """Held-out tasks of the first (version 0) and of the final evaluation."""
    samples_per_task: int = Field(default=1, ge=1, le=1024)
    """Samples of each held-out task: the k of avg@k, and the largest k of pass@k."""
    pass_reward: float = Field(default=1.0, ge=-1e9, le=1e9)
    """A sample with at least this reward counts as passed in pass@k."""
    request_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a node's leases that evaluations on request may take while there is training to do, at least one lease.
    Those of the recipe come before training.
    """

    @model_validator(mode="after")
    def _samples_bounded(self) -> EvaluationSettings:
        most = max(self.num_samples, self.final_samples) * self.samples_per_task
        if most > MAX_EVALUATION_SAMPLES:
            raise ValueError(
                f"an evaluation of {most:,} samples (tasks · samples_per_task) is larger than "
                f"{MAX_EVALUATION_SAMPLES:,}; lower samples_per_task, num_samples or final_samples"
            )
        return self


class ReplaySettings(Section):
    """Groups that were trained on and are trained on again, beside new ones."""

    ratio: float = Field(default=0.25, gt=0, lt=1)
    """Share of `groups_per_step` that is replayed, rounded down; a step has fewer while fewer are kept."""
    max_groups: int = Field(default=256, ge=1, le=65_536)
    """Groups kept. Beyond it those that come last in the order go, by age where it is `uniform`."""
    max_staleness: int = Field(default=8, ge=0, le=1024)
    """Largest staleness, in versions, of a group that is replayed."""
    max_uses: int = Field(default=1, ge=1, le=1024)
    """Times that a group is replayed at most."""
    order: Literal["recent", "uniform", "priority"] = "uniform"
    """Which come first: the newest, any alike, or the largest mean |reward - mean| / deviation of a group."""


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


class BatchSettings(Section):
    """What the batches of a policy are made of."""

    groups_per_step: int = Field(default=16, ge=1, le=65_536)
    """Groups in one batch."""
    max_staleness: int = Field(default=2, ge=0, le=1024)
    """Largest staleness, in versions, of a trajectory when its batch is bound; 0 is exactly on-policy."""
    stale_tokens: StaleTokenSettings | None = None
    """What becomes of older tokens; unset: a group with one is dropped."""
    replay: ReplaySettings | None = None
    """Replay; unset: every group is trained on once."""
    batch_needs: BatchNeedsSettings | None = None
    """What a batch waits for; unset: for `groups_per_step` groups, whatever they are."""
    max_failed_batches: int = Field(default=2, ge=0, le=1_000_000)
    """Batches in a row whose steps may fail twice alike, for which they are quarantined, before the run is stopped as
    failed. 0 stops it with the first.
    """

    @property
    def fresh_groups(self) -> int:
        """Groups of a step that are new."""
        return self.groups_per_step - int(self.groups_per_step * (self.replay.ratio if self.replay else 0))


class DataflowSettings(BatchSettings):
    """How tasks become batches."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Episodes per task (G)."""
    filters: tuple[DataPluginSettings, ...] = ()
    """`Filter` plug-ins, applied in order to each complete group."""
    routes: tuple[RouteSettings, ...] = Field(default=(), max_length=64)
    """Where complete groups go before filters see them: the first that is of a group decides; to training otherwise."""
    curators: tuple[DataPluginSettings, ...] = ()
    """`Curator` plug-ins, asked in order about drawn tasks; each sees what those before it left."""
    selector: DataPluginSettings | None = None
    """`Selector` plug-in that chooses the groups of a batch; unset: those whose staleness deadline is nearest."""
    admit: Literal["any", "all"] = "any"
    """When tasks of several trained roles are leased: while the policy of `any` role has room in its staleness window
    (leases name the roles without, and workflows skip their trajectories), or only while those of `all` roles have.
    """
    alternate_every_steps: int | None = Field(default=None, ge=1, le=1_000_000)
    """Policies are trained in turns of so many steps, in the order of their names, and frozen between them.
    Unset: all at once.
    """
    barrier: Literal["none", "batch", "phase"] = "none"
    """How far nodes run ahead of trainers. `none`: as far as the staleness windows allow. `batch`: tasks of the next
    batch are leased when the one before is bound. `phase`: besides, none while a policy trains, and none is trained on
    while groups are sampled. For synchronous baselines.
    """
    min_acceptance: float = Field(default=0.1, gt=0, le=1)
    """Floor of the moving average of groups surviving filters, used by admission."""
    lease_ttl_s: float = Field(default=20.0, ge=0.5, le=3600)
    """Time before an unrenewed lease is handed to another node."""
    max_attempts: int = Field(default=4, ge=1, le=100)
    """Leases of one task before it ends in the dead-letter stream."""
    max_identical_failures: int = Field(default=100, ge=0, le=1_000_000)
    """Leases that may fail alike (same exception, same line) in a row, without a task completed between them, before
    the run is stopped as failed. 0 stops no run.
    """
    max_poison: int = Field(default=16, ge=0, le=1_000_000)
    """Episodes of a node that are refused as poison, beyond one for 20 that are accepted, before it is drained and its
    leases go to others. 0 drains none.
    """
    max_leases: int | None = Field(default=None, ge=1, le=1_000_000)
    """Quota: leases of the run at a time, of evaluations too, whatever nodes ask for. Unset: any number."""
    hedge: HedgeSettings | None = None
    """Second copies of training tasks that take long, for nodes that find nothing else to do; unset: none."""
    max_abs_reward: float = Field(default=DEFAULT_MAX_ABS_REWARD, gt=0, le=_MOST_ABS_REWARD)
    """Largest absolute value of a reward, of a turn or a trajectory, and of a metric; an episode with a larger one is
    refused as poison (`reward_range`).
    """
    min_members: int | None = Field(default=None, ge=1)
    """Smallest k with which a group whose members failed for good is closed and used; unset drops such
    groups."""
    group_deadline_s: float = Field(default=600.0, ge=1, le=604_800)
    """Time after which an incomplete group is closed or dropped."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Held-out evaluation."""
    archive: ArchiveSettings | None = None
    """Trajectories that are kept in the run's store after their part in it is over; unset keeps none."""

    @model_validator(mode="after")
    def _members_fit(self) -> DataflowSettings:
        if self.min_members is not None and self.min_members > self.group_size:
            raise ValueError(
                f"min_members {self.min_members} exceeds group_size {self.group_size}; "
                f"lower it or raise group_size"
            )
        return self


PoolName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class PoolBounds(Section):
    """How small and how large a pool may be."""

    min_nodes: int = Field(default=1, ge=0, le=10_000)
    """Nodes that it always has."""
    max_nodes: int = Field(ge=1, le=10_000)
    """Nodes that it never has more than."""

    @model_validator(mode="after")
    def _ordered(self) -> PoolBounds:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}, max_nodes {self.max_nodes}; swap them")
        return self


class AutoscalingSettings(Section):
    """Nodes follow what the trainer waits and how stale its batches are; between the bounds nothing changes."""

    pools: dict[PoolName, PoolBounds] = Field(min_length=1, max_length=64)
    """Filled in this order, the first up to its `max_nodes` before the second gets more than its `min_nodes`."""
    start_nodes: int | None = Field(default=None, ge=0, le=640_000)
    """Of all pools, before anything is measured; the sum of `min_nodes` where it is not given."""
    grow_above_wait: float = Field(default=0.1, gt=0, lt=1)
    """Share of its time that a trainer waits for groups, beyond which nodes are added."""
    shrink_below_wait: float = Field(default=0.03, ge=0, lt=1)
    """Nodes are taken away while every trainer waits less."""
    shrink_above_staleness: float = Field(default=0.5, ge=0, le=1)
    """And while batches are staler than this share of `max_staleness`, which says that groups pile up."""
    fill: float = Field(default=0.9, gt=0, le=1)
    """Share of the places of the nodes that are left which their tasks may take."""
    window_s: float = Field(default=60.0, ge=0.1, le=86_400)
    """Shortest time that is measured before a decision."""
    window_steps: int = Field(default=3, ge=1, le=1000)
    """Fewest steps of each policy in it, unless its trainer does nothing but wait."""
    start_s: float = Field(default=180.0, ge=0, le=86_400)
    """Longest time that nodes are given to come or go before it is measured again."""
    shrink_after_s: float = Field(default=300.0, ge=0, le=86_400)
    """Time after nodes were added in which none is taken away: bounds how often the direction changes."""

    @property
    def min_nodes(self) -> int:
        """Of all pools together."""
        return sum(pool.min_nodes for pool in self.pools.values())

    @property
    def max_nodes(self) -> int:
        """Of all pools together."""
        return sum(pool.max_nodes for pool in self.pools.values())

    @property
    def first_nodes(self) -> int:
        """Of all pools together, to begin with."""
        return self.min_nodes if self.start_nodes is None else self.start_nodes

    def split(self, nodes: int) -> dict[str, int]:
        """How many of `nodes` each pool has: its least, and what is left in the order of the pools."""
        left, found = nodes - self.min_nodes, {}
        for name, pool in self.pools.items():
            more = max(0, min(left, pool.max_nodes - pool.min_nodes))
            found[name], left = pool.min_nodes + more, left - more
        return found

    @model_validator(mode="after")
    def _has_a_dead_band(self) -> AutoscalingSettings:
        if self.shrink_below_wait >= self.grow_above_wait:
            raise ValueError(
                f"shrink_below_wait is {self.shrink_below_wait}, grow_above_wait {self.grow_above_wait}; leave room "
                "between them, or nodes come and go for ever"
            )
        if not self.min_nodes <= self.first_nodes <= self.max_nodes:
            raise ValueError(
                f"start_nodes is {self.start_nodes}; the pools have {self.min_nodes} to {self.max_nodes} nodes"
            )
        return self
