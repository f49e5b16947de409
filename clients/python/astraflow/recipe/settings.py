"""The recipe: the one validated description of a run that every daemon reads.

A recipe is a folder with `recipe.yaml` and, for its own plug-ins, `recipe.py`. Unknown keys, wrong types and
impossible combinations are refused before anything starts, with the line, the nearest known key and the
arithmetic. Endpoints and secrets are never part of a recipe; they come from the deployment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, model_validator

from astraflow.recipe.advantage import AnyAdvantage
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.roles import (
    PolicyName,
    ResolvedRole,
    RoleName,
    RoleSettings,
    require_policy,
    resolve_roles,
)
from astraflow.recipe.section import Section, merged

SCHEMA_VERSION = 1


class RunSettings(Section):
    """What is trained and for how long."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    """Name of the run, and its id: lower-case letters, digits and dashes."""
    dataset: PluginSettings
    """`Dataset` plug-in; its class may take `seed`, which is run.seed."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds the data set, the initial weights, the warm start and the sampling."""
    steps: int = Field(default=100, ge=1, le=10_000_000)
    """Optimizer steps of each policy that does not say otherwise."""


class ArchitectureSettings(Section):
    """A model built from numbers instead of downloaded."""

    model_type: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    """Architecture family: dense models that trainer, CPU engine and SGLang compute alike."""
    hidden_size: int = Field(ge=8, le=65_536)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(ge=1, le=512)
    """Number of transformer blocks."""
    num_attention_heads: int = Field(ge=1, le=1024)
    """Query heads per block."""
    num_key_value_heads: int = Field(ge=1, le=1024)
    """Key/value heads per block; divides num_attention_heads."""
    head_dim: int = Field(ge=2, le=1024)
    """Width of one head; even."""
    intermediate_size: int = Field(ge=8, le=1_048_576)
    """Width of the feed-forward block."""
    max_position_embeddings: int = Field(default=512, ge=16, le=10_485_760)
    """Longest sequence, prompt included."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding."""
    tie_word_embeddings: bool = True
    """Whether the output layer shares the embedding's weights."""
    initializer_range: float = Field(default=0.02, gt=0, le=1)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ArchitectureSettings:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups} "
                f"(remainder {heads % groups}); choose num_key_value_heads among the divisors of {heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even width")
        if self.model_type == "llama" and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} of a llama model is not a multiple of num_attention_heads {heads} "
                f"(remainder {self.hidden_size % heads}); choose num_attention_heads among the divisors of "
                f"{self.hidden_size}"
            )
        return self


class TokenizerSettings(Section):
    """A byte-level BPE tokenizer trained on the demonstrations."""

    from_policy: PolicyName | None = None
    """Take the tokenizer that this policy trains on its demonstrations; the other keys are then those of that policy.
    """
    vocab_size: int = Field(default=512, ge=260, le=1_000_000)
    """Upper bound of the vocabulary, special tokens included."""
    num_texts: int = Field(default=2000, ge=1, le=10_000_000)
    """Demonstrations read to train it."""


class WarmStartSettings(Section):
    """Supervised steps that give reinforcement learning something to select from. Cached in the data dir."""

    demonstrations: PluginSettings
    """`Demonstrations` plug-in: called with a seed, yields examples."""
    steps: int = Field(ge=1, le=10_000_000)
    """Supervised optimizer steps."""
    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Examples per step."""
    learning_rate: float = Field(default=3e-3, gt=0, le=1)
    """Peak learning rate; 20 warm-up steps, then linear to a hundredth."""


class ExternalSettings(Section):
    """A model behind an OpenAI-compatible endpoint, for a policy that is only asked, and for its text only. Where the
    endpoint is, and its key, are settings of nodes.
    """

    model: str = Field(min_length=1, max_length=256)
    """Name of the model at the endpoint."""
    max_concurrent_calls: int = Field(default=16, ge=1, le=4096)
    """Calls that one node makes at once; others wait."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Time one attempt of a call may take."""
    max_attempts: int = Field(default=4, ge=1, le=100)
    """Attempts of a call while the endpoint is busy, failing or out of reach."""


class SnapshotSettings(Section):
    """A past version of a trained policy, for a policy that is only asked: give `version` or `every_versions`."""

    of: PolicyName
    """The trained policy."""
    version: int | None = Field(default=None, ge=0, le=2_097_151)
    """Always this version; version 0 until there is it."""
    every_versions: int = Field(default=0, ge=0, le=2_097_151)
    """Each multiple of this joins the pool, and another member of the pool is drawn then."""
    keep: int = Field(default=1, ge=1, le=256)
    """Size of the pool: its newest members. 1: always the newest."""
    draw: Literal["uniform", "rating"] = "uniform"
    """Each member alike, or by rating: p · (1 − p), with p what the trained policy is expected to score against it."""
    result: str = Field(default="win", min_length=1, max_length=128)
    """Metric of episodes that ratings are by: what the trained policy scored, 1 won, 0.5 drawn, 0 lost."""

    @model_validator(mode="after")
    def _one_rule(self) -> SnapshotSettings:
        if (self.version is None) == (self.every_versions == 0):
            raise ValueError(
                f"a snapshot has version {self.version} and every_versions {self.every_versions}; give `version`, "
                "which stays, or `every_versions` of at least 1"
            )
        if self.version is not None and self.keep > 1:
            raise ValueError(f"keep {self.keep} is for a pool; give `every_versions` instead of `version`")
        return self


class ModelSettings(Section):
    """Where the initial weights come from: exactly one of `path`, `architecture`, `from_policy`, `snapshot` and
    `external`.
    """

    path: str | None = None
    """A Hugging Face model directory or hub name."""
    from_policy: PolicyName | None = None
    """Start with the weights and the tokenizer that this policy starts with."""
    snapshot: SnapshotSettings | None = None
    """Past versions of a policy that is trained. Needs `train: false`."""
    external: ExternalSettings | None = None
    """No weights: ask an endpoint. Needs `train: false`."""
    architecture: ArchitectureSettings | None = None
    """Build the model from numbers."""
    tokenizer: TokenizerSettings | None = None
    """Train a tokenizer; needed with `architecture`."""
    warm_start: WarmStartSettings | None = None
    """Supervised steps before reinforcement learning; needed with `architecture`."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        sources = self.path, self.architecture, self.from_policy, self.snapshot, self.external
        if sources.count(None) != len(sources) - 1:
            raise ValueError(
                "give exactly one of `path` (a model to load), `architecture` (a model to build), `from_policy` "
                "(another policy's), `snapshot` (another policy's past versions) and `external` (an endpoint)"
            )
        missing = [name for name in ("tokenizer", "warm_start") if getattr(self, name) is None]
        if self.architecture is not None and missing:
            raise ValueError(
                f"a model built from `architecture` also needs "
                f"{' and '.join(f'`{name}`' for name in missing)}"
            )
        if self.path is not None and self.tokenizer is not None:
            raise ValueError("`tokenizer` trains a new one and cannot be combined with `path`; remove it")
        elsewhere = next(
            (name for name in ("from_policy", "snapshot", "external") if getattr(self, name) is not None), ""
        )
        if elsewhere and (self.tokenizer or self.warm_start):
            raise ValueError(f"with `{elsewhere}` there is nothing to prepare here; remove the other keys")
        return self


class SamplingSettings(Section):
    """How the policy samples during rollout."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    """Softmax temperature; 0 is greedy (allowed for evaluation-only policies)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: int = Field(default=0, ge=0)
    """Number of candidates; 0 means all."""
    max_new_tokens: int = Field(default=256, ge=1, le=1_048_576)
    """Upper bound of new tokens per call."""


class EvaluationSettings(Section):
    """Held-out evaluation by the same nodes, at exact versions."""

    every_versions: int = Field(default=10, ge=0)
    """Evaluate all policies whenever one has announced another multiple of this; 0: first and final version only."""
    num_samples: int = Field(default=256, ge=1, le=1_000_000)
    """Held-out tasks of a periodic evaluation."""
    final_samples: int = Field(default=1024, ge=1, le=1_000_000)
    """Held-out tasks of the first (version 0) and of the final evaluation."""


class BatchSettings(Section):
    """What the batches of a policy are made of."""

    groups_per_step: int = Field(default=16, ge=1, le=65_536)
    """Groups in one batch."""
    max_staleness: int = Field(default=2, ge=0, le=1024)
    """Largest staleness, in versions, of a trajectory when its batch is bound; 0 is exactly on-policy."""


class DataflowSettings(BatchSettings):
    """How tasks become batches."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Episodes per task (G)."""
    filters: tuple[PluginSettings, ...] = ()
    """`Filter` plug-ins, applied in order to each complete group."""
    curators: tuple[PluginSettings, ...] = ()
    """`Curator` plug-ins, asked in order about drawn tasks; each sees what those before it left."""
    selector: PluginSettings | None = None
    """`Selector` plug-in that chooses the groups of a batch; unset: those whose staleness deadline is nearest."""
    admit: Literal["any", "all"] = "any"
    """When tasks of several trained roles are leased: while the policy of `any` role has room in its staleness window
    (leases name the roles without, and workflows skip their trajectories), or only while those of `all` roles have.
    """
    alternate_every_steps: int | None = Field(default=None, ge=1, le=1_000_000)
    """Policies are trained in turns of so many steps, in the order of their names, and frozen between them.
    Unset: all at once.
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
    min_members: int | None = Field(default=None, ge=1)
    """Smallest k with which a group whose members failed for good is closed and used; unset drops such
    groups."""
    group_deadline_s: float = Field(default=600.0, ge=1, le=604_800)
    """Time after which an incomplete group is closed or dropped."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Held-out evaluation."""

    @model_validator(mode="after")
    def _members_fit(self) -> DataflowSettings:
        if self.min_members is not None and self.min_members > self.group_size:
            raise ValueError(
                f"min_members {self.min_members} exceeds group_size {self.group_size}; "
                f"lower it or raise group_size"
            )
        return self


class RewardLimitSettings(Section):
    """Where the reward runs and what it may use; what is not given is the plug-in's own choice."""

    processes: int | None = Field(default=None, ge=0, le=256)
    """Worker processes per node; 0 is the node's event loop."""
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    """Seconds one call may take in a worker, or awaited."""
    memory_mb: int | None = Field(default=None, ge=128, le=1_048_576)
    """MiB of data one worker may allocate."""
    max_calls: int | None = Field(default=None, ge=1)
    """Calls after which a worker is replaced."""


class RaasSettings(Section):
    """What nodes run."""

    workflow: PluginSettings = PluginSettings(use="astraflow_raas.workflows.single_turn:SingleTurn")
    """`Workflow` plug-in; its class may take `reward`, which is the reward below."""
    reward: PluginSettings | None = None
    """`Reward` plug-in; for a workflow whose environment gives all rewards it may be left out."""
    reward_limits: RewardLimitSettings = RewardLimitSettings()
    """Processes, time and memory of the reward, instead of those of the plug-in."""
    max_concurrent_tasks: int = Field(default=16, ge=1, le=65_536)
    """Tasks a node runs at once."""
    episode_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Time one episode may take."""
    swap: Literal["in_place", "retract"] = "in_place"
    """What becomes of running calls when a newer version is loaded: they go on with the keys and values that they have,
    or these are computed anew with the new weights, which costs a prefill of each.
    """
    swap_seats: tuple[RoleName, RoleName] | None = None
    """Two roles that change places in every other episode of a task."""

    @model_validator(mode="after")
    def _seats_differ(self) -> RaasSettings:
        if self.swap_seats and self.swap_seats[0] == self.swap_seats[1]:
            raise ValueError(
                f"swap_seats names {self.swap_seats[0]!r} twice; name two roles, or leave it out"
            )
        return self


class OptimizerSettings(Section):
    """AdamW on fp32 masters, arXiv 1711.05101."""

    learning_rate: float = Field(default=1e-6, ge=0, le=1)
    """Peak learning rate; 0 is a control that must not learn."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First-moment decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second-moment decay."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator; a large value makes updates proportional to the gradient and deltas sparser.
    """
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay of matrices, not of norm weights."""
    warmup_steps: int = Field(default=5, ge=0)
    """Linear warm-up steps."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Bound of the global gradient norm."""


class PublishSettings(Section):
    """Weight versions."""

    max_behind: int = Field(default=1, ge=1, le=64)
    """Versions publishing may lag behind training before the trainer waits with reason `publish`."""
    snapshot_every_versions: int = Field(default=64, ge=1)
    """A snapshot at least this often, besides the deltas."""
    keep_snapshots: int = Field(default=2, ge=0, le=10_000)
    """Newest snapshots that stay in the store, with every version after the oldest of them; older versions stay while
    they are pinned. 0 deletes nothing.
    """
    collect_after_s: float = Field(default=900.0, ge=0, le=86_400)
    """Seconds between marking old parts and deleting them."""
    probe: bool = True
    """Publish with each version what it answers to fixed prompts; nodes compare what their engines answer."""
    encode_threads: int = Field(default=2, ge=1, le=64)
    """Tiles of a version encoded at a time, while finished parts are sent; a device trainer has cores to spare."""
    codec: Literal["rice", "rice_ctx"] = "rice"
    """How deltas are coded. `rice_ctx` sends about 0.7 of the bytes for about 2.5 times the CPU: for slow or
    billed links. How to choose: docs/weights.md.
    """


class TrainerSettings(Section):
    """How batches become steps."""

    tokens_per_microbatch: int = Field(default=8192, ge=16, le=16_777_216)
    """Token budget of one packed micro-batch."""
    checkpoint_every_steps: int = Field(default=20, ge=1)
    """Steps between durable checkpoints, at most."""
    checkpoint_every_s: float = Field(default=600.0, ge=1, le=86_400)
    """Seconds between durable checkpoints, at most, unless a step takes longer: what a killed trainer takes again."""
    keep_checkpoints: int = Field(default=2, ge=1, le=1000)
    """Checkpoints kept."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """Advantage and loss."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW."""
    publish: PublishSettings = PublishSettings()
    """How steps become weight versions."""


class PolicySettings(Section):
    """One policy: its model, its sampling, and where it differs from `run`, `dataflow` and `trainer`."""

    model: ModelSettings
    """Initial weights."""
    train: bool = True
    """Whether it is trained. If not, its weights stay as they are and it is only asked: a fixed judge, a reference."""
    sampling: SamplingSettings = SamplingSettings()
    """Rollout sampling."""
    steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """Optimizer steps of this policy instead of run.steps."""
    dataflow: BatchSettings | None = None
    """Batches of this policy; a key left out is taken from `dataflow`."""
    trainer: TrainerSettings | None = None
    """Training of this policy; a key left out is taken from `trainer`, at any depth. A loss, an advantage, an anchor
    or an aggregation replaces the one there as a whole.
    """

    @field_serializer("dataflow", "trainer")
    def _as_given(self, value: Section | None) -> dict[str, Any] | None:
        """Only what was given: a default written out would count as given when the text is read again."""
        return None if value is None else value.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True)
class ResolvedPolicy:
    """All settings of one policy; `Recipe.policy` makes it, and nothing else reads them."""

    policy_id: str
    model: ModelSettings
    """Of the policy that the weights are from."""
    tokenizer_of: str
    """The policy whose tokenizer it has; the policy itself where it has its own."""
    train: bool
    sampling: SamplingSettings
    steps: int
    batches: BatchSettings
    trainer: TrainerSettings
    advantages: Mapping[str, AnyAdvantage | PluginSettings]
    """Of its roles that have one of their own."""


class Recipe(Section):
    """A whole recipe. `Recipe.model_json_schema()` is published for editors as docs/recipe.schema.json."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    run: RunSettings
    """What is trained."""
    policies: dict[PolicyName, PolicySettings] = Field(min_length=1, max_length=64)
    """The policies trained together, by id. Their settings, resolved, are read through `Recipe.policy`."""
    roles: dict[RoleName, RoleSettings] = Field(default={}, max_length=64)
    """Which policy plays which role of the workflow. Left out: each policy plays the role of its own name. Resolved,
    they are read through `Recipe.resolved_roles`.
    """
    dataflow: DataflowSettings = DataflowSettings()
    """Groups, leases, staleness and evaluation."""
    raas: RaasSettings
    """Workflow, reward and their limits."""
    trainer: TrainerSettings = TrainerSettings()
    """Algorithm, optimizer, checkpoints and publishing."""

    @model_validator(mode="after")
    def _sequences_fit(self) -> Recipe:
        for name, policy in self.resolved_policies.items():
            architecture = policy.model.architecture
            if architecture and policy.sampling.max_new_tokens >= architecture.max_position_embeddings:
                raise ValueError(
                    f"policies.{name}: max_new_tokens {policy.sampling.max_new_tokens} leaves no "
                    f"room for a prompt within max_position_embeddings "
                    f"{architecture.max_position_embeddings}; lower the first or raise the second"
                )
        return self

    @model_validator(mode="after")
    def _policies_fit(self) -> Recipe:
        for name, snapshot in self.snapshots.items():
            _check_snapshot(name, snapshot, policies=self.policies)
        for name in self.raas.swap_seats or ():
            require_policy(name, self.resolved_roles, place="raas.swap_seats", kind="role")
        num_trained = sum(policy.train for policy in self.policies.values())
        if not num_trained:
            raise ValueError("no policy is trained; take `train: false` from one of policies")
        if self.dataflow.alternate_every_steps and num_trained == 1:
            raise ValueError(
                f"dataflow.alternate_every_steps is {self.dataflow.alternate_every_steps} and one policy is trained; "
                "take it out, or train another policy"
            )
        _ = self.resolved_roles
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> Recipe:
        """Under `all`, what a window always has free when nothing is in flight must hold a task's groups."""
        trained = Counter(role.policy_id for role in self.resolved_roles.values() if role.is_trained)
        for policy_id, num_roles in trained.items():
            batches = self.resolved_policies[policy_id].batches
            room = batches.max_staleness * batches.groups_per_step + 1
            if self.dataflow.admit == "all" and num_roles > room:
                raise ValueError(
                    f"dataflow.admit is `all` and policy {policy_id!r} has {num_roles} trained roles, but its window "
                    f"may have room for {room} groups only (max_staleness {batches.max_staleness} · groups_per_step "
                    f"{batches.groups_per_step} + 1); raise one of them, or set admit to `any`"
                )
        return self

    @cached_property
    def resolved_policies(self) -> Mapping[str, ResolvedPolicy]:
        """Every policy with its settings, in recipe order."""
        return {policy_id: self._resolve(policy_id) for policy_id in self.policies}

    @cached_property
    def resolved_roles(self) -> Mapping[str, ResolvedRole]:
        """Every role with the policy that plays it, in recipe order."""
        trained = {policy_id: policy.train for policy_id, policy in self.policies.items()}
        return resolve_roles(self.roles, trained=trained)

    @property
    def advantages(self) -> Mapping[str, AnyAdvantage | PluginSettings]:
        """How the rewards of each trained role become advantages."""
        policies = {
            name: self.policy(role.policy_id) for name, role in self.resolved_roles.items() if role.is_trained
        }
        return {
            name: policy.advantages.get(name, policy.trainer.algorithm.advantage)
            for name, policy in policies.items()
        }

    @property
    def snapshots(self) -> Mapping[str, SnapshotSettings]:
        """The policies that are past versions of trained ones."""
        return {
            name: policy.model.snapshot for name, policy in self.policies.items() if policy.model.snapshot
        }

    @property
    def served_policies(self) -> tuple[str, ...]:
        """The policies that have weights, and so versions and engines."""
        return tuple(name for name, policy in self.resolved_policies.items() if policy.model.external is None)

    def policy(self, policy_id: str) -> ResolvedPolicy:
        """Return the settings of a policy. Raises KeyError when there is no such policy."""
        return self.resolved_policies[policy_id]

    def _resolve(self, policy_id: str) -> ResolvedPolicy:
        policy = self.policies[policy_id]
        model = self.policies[self._source(policy_id, "from_policy")].model
        tokenizer_of = self._source(policy_id, "tokenizer.from_policy")
        if model.architecture and self.policies[tokenizer_of].model.tokenizer is None:
            raise ValueError(
                f"policies.{policy_id}.model.tokenizer.from_policy: policy {tokenizer_of!r} trains no tokenizer, its "
                "model has one; name a policy that is built from `architecture`"
            )
        if model.external and (policy.train or policy.model.from_policy):
            raise ValueError(
                f"policies.{policy_id}: a model that is an external endpoint has no weights to train or to start from; "
                "set `train: false` on its policy, and name another in `from_policy`"
            )
        trainer = merged(self.trainer, policy.trainer or TrainerSettings())
        try:
            trainer.algorithm.require_consistent()
        except ValueError as error:
            raise ValueError(f"policies.{policy_id}: {error}") from error
        return ResolvedPolicy(
            policy_id=policy_id,
            model=model,
            tokenizer_of=tokenizer_of,
            train=policy.train,
            sampling=policy.sampling,
            steps=policy.steps or self.run.steps,
            batches=merged(self.dataflow, policy.dataflow or BatchSettings()),
            trainer=trainer,
            advantages={
                name: role.advantage
                for name, role in self.roles.items()
                if role.policy == policy_id and role.advantage is not None
            },
        )

    def _source(self, policy_id: str, key: str) -> str:
        """Return the policy that `from_policy` leads to: for weights, or with `tokenizer.from_policy` for those too."""
        path = [policy_id]
        while True:
            model = self.policies[path[-1]].model
            tokenizer = model.tokenizer if key == "tokenizer.from_policy" else None
            of = model.snapshot and model.snapshot.of
            following = model.from_policy or of or (tokenizer and tokenizer.from_policy)
            if not following:
                return path[-1]
            require_policy(following, self.policies, place=f"policies.{path[-1]}.model")
            if following in path:
                circle = " → ".join([*path, following])
                raise ValueError(
                    f"policies.{policy_id}.model: `{'snapshot' if of else 'from_policy'}` leads in a circle, {circle}; "
                    "break it"
                )
            path.append(following)


def _check_snapshot(name: str, snapshot: SnapshotSettings, *, policies: Mapping[str, PolicySettings]) -> None:
    """Raise ValueError unless the policy is not trained and its source is."""
    require_policy(snapshot.of, policies, place=f"policies.{name}.model.snapshot.of")
    if policies[name].train:
        raise ValueError(f"policies.{name} is a snapshot and cannot be trained; set `train: false`")
    if not policies[snapshot.of].train:
        raise ValueError(
            f"policies.{name}.model.snapshot.of: policy {snapshot.of!r} is not trained and has one version only; name "
            "one that is, or use `from_policy`"
        )


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of recipe.yaml for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
