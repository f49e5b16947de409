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
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_serializer, model_validator

from astraflow.recipe.advantage import AnyAdvantage
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow.recipe.dataflow import AutoscalingSettings, BatchSettings, DataflowSettings, RowLimits
from astraflow.recipe.groups import require_routes
from astraflow.recipe.model import (
    LoraSettings,
    ModelSettings,
    ReferenceModel,
    SamplingSettings,
    SnapshotSettings,
)
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
from astraflow.recipe.trackers import AnyTracker

SCHEMA_VERSION = 1

SourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]


class SourceSettings(Section):
    """One of several data sets whose tasks are mixed."""

    dataset: PluginSettings
    """`Dataset` plug-in, as in run.dataset."""
    weight: int = Field(default=1, ge=1, le=1000)
    """How many of its tasks come in each turn, in which every source that has tasks comes."""
    workflow: PluginSettings | None = None
    """`Workflow` plug-in of its tasks instead of raas.workflow; both play the same roles, or fewer."""
    reward: PluginSettings | None = None
    """`Reward` plug-in of its tasks instead of raas.reward."""


class RunSettings(Section):
    """What is trained and for how long."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    """Name of the run, and its id: lower-case letters, digits and dashes."""
    dataset: PluginSettings | None = None
    """`Dataset` plug-in; its class may take `seed`, which is run.seed. Or give `sources`."""
    sources: dict[SourceName, SourceSettings] = Field(default={}, max_length=64)
    """Several data sets instead of one, by the name that their tasks have as `source`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds the data set, the initial weights, the warm start and the sampling."""
    steps: int = Field(default=100, ge=0, le=10_000_000)
    """Optimizer steps of each policy that does not say otherwise. 0: nothing is trained, whatever policies say; the
    weights to start from become version 0, which is evaluated, and the run ends.
    """

    @model_validator(mode="after")
    def _has_data(self) -> RunSettings:
        if (self.dataset is None) == (not self.sources):
            raise ValueError("give either `dataset`, or `sources` with one data set each")
        return self

    @property
    def data_name(self) -> str:
        """What errors call the data set."""
        return self.dataset.use if self.dataset else f"run.sources ({', '.join(self.sources)})"


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
    autoscaling: AutoscalingSettings | None = None
    """How many nodes there should be; they are as many as somebody starts where it is not given."""
    swap_seats: tuple[RoleName, RoleName] | None = None
    """Two roles that change places in every other episode of a task."""

    @model_validator(mode="after")
    def _seats_differ(self) -> RaasSettings:
        if self.swap_seats and self.swap_seats[0] == self.swap_seats[1]:
            raise ValueError(
                f"swap_seats names {self.swap_seats[0]!r} twice; name two roles, or leave it out"
            )
        return self


class AverageSettings(Section):
    """An exponential average of the fp32 masters, kept in checkpoints: 4 bytes per weight."""

    decay: float = Field(default=0.999, gt=0, lt=1)
    """Share of the average that a step keeps; it is the plain mean of the masters until that would be less."""
    publish: bool = False
    """Whether versions are the average, which is what nodes sample from then; training goes on from the masters."""


Untouched = Literal["norms", "biases", "embeddings"]


class OptimizerSettings(Section):
    """What becomes of gradients, on fp32 masters."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """AdamW (arXiv 1711.05101); the same with moments of 8 bits (arXiv 2110.02861) for all but norms and biases; or
    Muon (arXiv 2502.16982) for matrices, AdamW for embeddings, output head, norms and biases, by the same learning
    rate.
    """
    learning_rate: float = Field(default=1e-6, ge=0, le=1)
    """Peak learning rate; 0 is a control that must not learn."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First-moment decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second-moment decay."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator; a large value makes updates proportional to the gradient and deltas sparser.
    """
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of Muon."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay."""
    no_decay: list[Untouched] = Field(default=["norms", "biases"], max_length=3)
    """What weight decay leaves alone; `embeddings` are the input embedding and the output head."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after its warm-up: as it is, or along a line or half a cosine to `final_fraction`."""
    warmup_steps: int = Field(default=5, ge=0)
    """Linear warm-up steps."""
    decay_steps: int = Field(default=0, ge=0)
    """The step, the warm-up included, at which `final_fraction` is reached, and stays; not with `constant`."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Of the peak learning rate, where a schedule ends."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Bound of the global gradient norm."""
    average: AverageSettings | None = None
    """An exponential average of the weights; none by default."""

    @model_validator(mode="after")
    def _schedule_ends(self) -> OptimizerSettings:
        if self.schedule == "constant" and self.decay_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} does nothing with schedule constant; write schedule: linear or "
                "cosine, or leave it out"
            )
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule} decays from step {self.warmup_steps} (warmup_steps) to step "
                f"{self.decay_steps} (decay_steps), which must be later; run.steps is the usual choice"
            )
        return self


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
    codec: Literal["rice", "rice_ctx", "full"] = "rice"
    """How deltas are coded. `rice_ctx` sends about 0.7 of the bytes for about 2.5 times the CPU: for slow or
    billed links. `full` makes none: each version is the whole model, to compare with. How to choose: docs/weights.md.
    """


class TrainerSettings(Section):
    """How batches become steps."""

    tokens_per_microbatch: int = Field(default=8192, ge=16, le=16_777_216)
    """Token budget of one packed micro-batch."""
    gradient_sync: Literal["step", "micro_batch"] = "step"
    """How often several ranks add their gradients up: once a step, for which each keeps the gradient of the whole model
    (4 bytes per weight), or after each micro-batch, which sends as much each time.
    """
    prefetch: bool = True
    """Fetch and check the batch of the next step while a step computes. Nothing is read ahead with `dataflow.barrier`,
    `alternate_every_steps` or `max_staleness: 0`.
    """
    router_replay: bool = False
    """Of a mixture of experts: nodes record which experts each token went to in the engine, and steps compute with
    those. Needs SGLang, and nodes that may write into the run's store.
    """
    checkpoint_every_steps: int = Field(default=20, ge=1)
    """Steps between durable checkpoints, at most."""
    checkpoint_every_s: float = Field(default=600.0, ge=1, le=86_400)
    """Seconds between durable checkpoints, at most, unless a step takes longer: what a killed trainer takes again."""
    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the forward and the backward pass; `auto` is fp32 on a CPU, bf16 on a GPU. Masters, moments and
    sums of gradients are fp32, weights bf16, in either.
    """
    keep_checkpoints: int = Field(default=2, ge=1, le=1000)
    """Checkpoints kept."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """Advantage and loss."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW, its kin, and their schedule."""
    publish: PublishSettings = PublishSettings()
    """How steps become weight versions."""
    trackers: list[AnyTracker] = Field(default=[], max_length=3)
    """Experiment trackers that get the metrics of every step: `tensorboard`, `wandb`, `mlflow`."""

    @model_validator(mode="after")
    def _trackers_differ(self) -> TrainerSettings:
        kinds = [tracker.kind for tracker in self.trackers]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"trackers has one kind twice: {', '.join(kinds)}; name each once")
        return self


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


class Grading(NamedTuple):
    """How tasks of a source become episodes with rewards."""

    workflow: PluginSettings
    reward: PluginSettings | None


@dataclass(frozen=True)
class ResolvedPolicy:
    """All settings of one policy; `Recipe.policy` makes it, and nothing else reads them."""

    policy_id: str
    model: ModelSettings
    """Of the policy that the weights are from."""
    tokenizer_of: str
    """The policy whose tokenizer it has; the policy itself where it has its own."""
    vocab_size: int | None
    """Most token ids of a model that is built from `architecture`; None for others, which bring their own."""
    train: bool
    sampling: SamplingSettings
    steps: int
    batches: BatchSettings
    trainer: TrainerSettings
    advantages: Mapping[str, AnyAdvantage | PluginSettings]
    """Of its roles that have one of their own."""
    lora: LoraSettings | None = None
    """The adapter of `model` that it is; None when it is the model itself."""


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
        for name in {role.policy_id: None for role in self.resolved_roles.values()}:
            policy = self.policy(name)
            sampled, row = policy.sampling.max_new_tokens, policy.trainer.tokens_per_microbatch
            if policy.train:
                policy.sampling.require_trainable(f"policies.{name}.sampling")
            if policy.train and sampled >= row:
                raise ValueError(
                    f"policies.{name}: max_new_tokens {sampled} and a prompt of at least 1 token are more than "
                    f"trainer.tokens_per_microbatch {row}, and a row is never cut; lower the first or raise the second"
                )
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
        for name, lora in self.adapters.items():
            _check_lora(name, lora, policies=self.policies)
        for name in self.raas.swap_seats or ():
            require_policy(name, self.resolved_roles, place="raas.swap_seats", kind="role")
        trained = [name for name, policy in self.policies.items() if policy.train]
        if not trained:
            raise ValueError("no policy is trained; take `train: false` from one of policies")
        require_routes(self.dataflow.routes, trained=trained, has_archive=self.dataflow.archive is not None)
        if self.dataflow.alternate_every_steps and len(trained) == 1:
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
            if batches.batch_needs:
                batches.batch_needs.require_possible(policy_id, num_groups=batches.fresh_groups)
            has_barrier = self.dataflow.barrier != "none"
            room = 1 if has_barrier else batches.max_staleness * batches.fresh_groups + 1
            if batches.replay and batches.fresh_groups == batches.groups_per_step:
                raise ValueError(
                    f"replay.ratio {batches.replay.ratio} of {batches.groups_per_step} groups_per_step of policy "
                    f"{policy_id!r} is less than one group; raise one of them, or leave `replay` out"
                )
            if self.dataflow.admit == "all" and num_roles > room:
                because = (
                    f"dataflow.barrier is `{self.dataflow.barrier}`, and the last group of a batch comes alone"
                    if has_barrier
                    else f"max_staleness {batches.max_staleness} · groups_per_step {batches.groups_per_step} + 1"
                )
                raise ValueError(
                    f"dataflow.admit is `all` and policy {policy_id!r} has {num_roles} trained roles, but its window "
                    f"may have room for {room} groups only ({because}); raise the window, or set admit to `any`"
                )
        return self

    @cached_property
    def resolved_policies(self) -> Mapping[str, ResolvedPolicy]:
        """Every policy with its settings, in recipe order."""
        return {policy_id: self._resolve(policy_id) for policy_id in self.policies}

    @cached_property
    def row_limits(self) -> Mapping[str, RowLimits]:
        """What the trainer of each policy can train on, as far as the recipe says."""
        most = self.dataflow.max_abs_reward
        return {
            policy_id: RowLimits(policy.trainer.tokens_per_microbatch, policy.vocab_size, most)
            for policy_id, policy in self.resolved_policies.items()
        }

    @cached_property
    def resolved_roles(self) -> Mapping[str, ResolvedRole]:
        """Every role with the policy that plays it, in recipe order."""
        trained = {policy_id: policy.train for policy_id, policy in self.policies.items()}
        return resolve_roles(
            self.roles, trained=trained, unasked={lora.of for lora in self.adapters.values()}
        )

    @cached_property
    def grading(self) -> Mapping[str, Grading]:
        """Workflow and reward of each source's tasks; without `run.sources`, one of the name ``."""
        given = Grading(self.raas.workflow, self.raas.reward)
        own = {
            name: Grading(source.workflow or given.workflow, source.reward or given.reward)
            for name, source in self.run.sources.items()
        }
        return own or {"": given}

    @property
    def trains(self) -> bool:
        """Whether policies take steps; else the run is one evaluation of what they start from."""
        return self.run.steps > 0

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
    def adapters(self) -> Mapping[str, LoraSettings]:
        """The policies that are adapters of another one's model, and past versions of such."""
        models = {name: policy.model for name, policy in self.policies.items()}
        own = {
            name: models.get(model.snapshot.of, model) if model.snapshot else model
            for name, model in models.items()
        }
        return {name: model.lora for name, model in own.items() if model.lora}

    @property
    def recorded_policies(self) -> frozenset[str]:
        """The trained policies whose experts nodes record."""
        resolved = self.resolved_policies.items()
        return frozenset(name for name, policy in resolved if policy.train and policy.trainer.router_replay)

    @property
    def engine_policies(self) -> tuple[str, ...]:
        """The policies that have engines of their own."""
        return tuple(name for name in self.served_policies if name not in self.adapters)

    @property
    def served_policies(self) -> tuple[str, ...]:
        """The policies that have weights, and so versions."""
        return tuple(name for name, policy in self.resolved_policies.items() if policy.model.external is None)

    def policy(self, policy_id: str) -> ResolvedPolicy:
        """Return the settings of a policy. Raises KeyError when there is no such policy."""
        return self.resolved_policies[policy_id]

    def _resolve(self, policy_id: str) -> ResolvedPolicy:
        policy = self.policies[policy_id]
        model = self.policies[self._source(policy_id, "from_policy")].model
        tokenizer_of = self._source(policy_id, "tokenizer.from_policy")
        tokenizer = self.policies[tokenizer_of].model.tokenizer
        if model.architecture and tokenizer is None:
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
        of_roles = {
            name: role.advantage
            for name, role in self.roles.items()
            if role.policy == policy_id and role.advantage is not None
        }
        try:
            trainer.algorithm.require_consistent(
                is_adapter=policy.model.lora is not None, of_roles=of_roles.values()
            )
            if trainer.algorithm.kl and isinstance(trainer.algorithm.kl.reference, ReferenceModel):
                trainer.algorithm.kl.reference.require_buildable(model)
        except ValueError as error:
            raise ValueError(f"policies.{policy_id}: {error}") from error
        if trainer.router_replay and model.architecture:
            raise ValueError(
                f"policies.{policy_id}: router_replay is of a mixture of experts, and a model that is built from "
                "`architecture` is dense; leave it out, or give such a model by `path`"
            )
        return ResolvedPolicy(
            policy_id=policy_id,
            model=model,
            tokenizer_of=tokenizer_of,
            vocab_size=tokenizer.vocab_size if model.architecture and tokenizer else None,
            train=policy.train,
            sampling=policy.sampling,
            steps=self.run.steps and (policy.steps or self.run.steps),
            batches=merged(self.dataflow, policy.dataflow or BatchSettings()),
            trainer=trainer,
            advantages=of_roles,
            lora=policy.model.lora,
        )

    def _source(self, policy_id: str, key: str) -> str:
        """Return the policy that `from_policy` leads to: for weights, or with `tokenizer.from_policy` for those too."""
        path = [policy_id]
        while True:
            model = self.policies[path[-1]].model
            tokenizer = model.tokenizer if key == "tokenizer.from_policy" else None
            adapted = model.snapshot or model.lora
            of = adapted and adapted.of
            following = model.from_policy or of or (tokenizer and tokenizer.from_policy)
            if not following:
                return path[-1]
            require_policy(following, self.policies, place=f"policies.{path[-1]}.model")
            if following in path:
                circle = " → ".join([*path, following])
                raise ValueError(
                    f"policies.{policy_id}.model: `{_source_key(model)}` leads in a circle, {circle}; "
                    "break it"
                )
            path.append(following)


def _source_key(model: ModelSettings) -> str:
    return next(
        key for key in ("snapshot", "lora", "from_policy", "tokenizer") if getattr(model, key) is not None
    )


def _check_lora(name: str, lora: LoraSettings, *, policies: Mapping[str, PolicySettings]) -> None:
    """Raise ValueError unless the policy that is adapted has a model of its own that stays as it is."""
    place = f"policies.{name}.model.lora.of"
    require_policy(lora.of, policies, place=place)
    base = policies[lora.of]
    if base.train:
        raise ValueError(
            f"{place}: policy {lora.of!r} is trained, and an adapter is of weights that stay; set `train: false` on "
            f"it, or train {name!r} whole with `from_policy`"
        )
    if base.model.lora or base.model.snapshot or base.model.external:
        raise ValueError(f"{place}: policy {lora.of!r} has no model of its own; name the policy whose it is")


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
    """Return the JSON schema of recipe.yaml, and of files that extend it, for editors."""
    schema = Recipe.model_json_schema()
    extends = {
        "description": "The recipe file that this one is laid over, from this file's folder.",
        "type": "string",
    }
    schema["properties"] = {"extends": extends, **schema["properties"]}
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
