"""Model, optimizer and checkpoints of one policy, put together from the recipe.

Hands the policy's `trainer` settings to the compute core and offers the loop what `loop.Learner` names.
FSDP2 over a mesh of the trainer's ranks, on the device of each; with one rank the layout is the same. Every method is
a collective but `held`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import ResolvedPolicy, TrainerSettings
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.checkpoint import CheckpointStore, Position, require_whole
from astraflow_trainer.model.lora import adapted
from astraflow_trainer.model.model import PolicyModel, load_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import Placement, compute_of, shard
from astraflow_trainer.planning.memory_plan import RankLayout, memory_plan
from astraflow_trainer.publish.change_detection import DetectedChanges, Where
from astraflow_trainer.publish.loading import load_critic, load_policy
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.publish.published import HeldPart, WeightCopies
from astraflow_trainer.publish.publishing import ModelBytes
from astraflow_trainer.ranks.group import RankGroup
from astraflow_trainer.ranks.mesh import from_first_replica, rank_mesh, replica_of
from astraflow_trainer.step.critic import Critic
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.step.step import StepMetrics, StepSettings, train_step
from astraflow_weights.codec.shards import ShardedModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PolicyLearner:
    """One policy being trained. Not thread-safe: owned by the training thread."""

    def __init__(
        self,
        policy: ResolvedPolicy,
        *,
        plugins: StepPlugins,
        model_dir: Path,
        reference_dir: Path | None = None,
        checkpoint_dir: Path,
        group: RankGroup,
        snapshot: Where = "device",
        num_replicas: int = 1,
        placement: Placement | None = None,
        identity: str = "",
        seed: int = 0,
        keep_logprobs: bool = False,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Load this rank's part of the model, and of the one in `reference_dir` where a KL term needs it (None: the
        same); `checkpoint_dir` is one folder that all ranks see, `identity` the run's; an adapter begins with the
        numbers of `seed`. `moved` is called at each micro-batch.

        `snapshot` says where the bits of the last version are kept when the model is on a GPU; `placement` is
        how it lies there, where `compute` is the recipe's. Of `num_replicas` of the model, each on as many ranks, the
        first publishes. Where `keep_logprobs`, the metrics of steps have log-probs.
        """
        self._group, self._ranks, self._moved = group, group.training, moved
        training = policy.trainer
        compute = compute_of(training.compute, on_gpu=group.device.type != "cpu")
        placement = replace(placement or Placement(), compute=compute)
        _require_memory(policy, model_dir, group, num_replicas, placement, snapshot)
        mesh = self._mesh = rank_mesh(group.device, num_ranks=group.size, num_replicas=num_replicas)
        if policy.lora is None:
            self._policy = load_policy(model_dir, mesh=mesh, placement=placement).train()
        else:
            self._policy = PolicyModel(adapted(load_causal_lm(model_dir), policy.lora, seed=seed)).train()
            shard(self._policy.to(group.device), mesh=mesh, placement=placement)
        self._reference = _reference(
            training.algorithm, model_dir=reference_dir or model_dir, mesh=mesh, placement=placement
        )
        _require_fitting(self._policy, reference=self._reference, training=training)
        self._critic = _critic(training, model_dir=model_dir, mesh=mesh, placement=placement)
        self._optimizer = MasterOptimizer(self._policy, settings=training.optimizer)
        self._copies = _weight_source(self._policy, publishes=replica_of(mesh) == 0, snapshot=snapshot)
        self._prober = Prober(self._policy, ranks=self._ranks) if training.publish.probe else None
        self._settings = _step_settings(training, plugins=plugins, keep_logprobs=keep_logprobs)
        self._baselines: dict[str, float] = {}
        keep, saving = training.keep_checkpoints, group.saving_group
        self._checkpoints = CheckpointStore(
            checkpoint_dir, keep=keep, ranks=group.saving, group=saving, identity=identity
        )

    def restore(self, *, at_most: int | None = None) -> Position | None:
        """Load the newest complete checkpoint, at step `at_most` or before; None when there is none."""
        position = self._checkpoints.restore(self._optimizer, at_most=at_most, critic=self._critics)
        self._baselines = dict(position.baselines) if position else {}
        return position

    def positions(self) -> list[Position]:
        """Where the checkpoints stand, ascending by step."""
        return self._checkpoints.positions()

    def go_back(
        self,
        weights: ShardedModel,
        *,
        step: int,
        checkpoint: int | None,
        learning_rate: float | None,
        baselines: Mapping[str, float],
    ) -> None:
        """Take up published weights after step `step`, whose own are given up: this rank's shards of them.

        With the optimizer of the checkpoint of step `checkpoint`, else with a fresh one; `learning_rate` is the peak
        that an operator had set, `baselines` are the running baselines to go on with. Checkpoints after `step` are
        put aside: the server forgot those steps.
        """
        self._checkpoints.supersede_after(step)
        if checkpoint is not None:
            self._checkpoints.restore(self._optimizer, step=checkpoint, critic=self._critics)
        self._baselines = dict(baselines)
        values = self._copies.held.by_parameter(weights)
        for name in sorted(values):
            from_first_replica(values[name], mesh=self._mesh)
        self._optimizer.adopt(values)
        if learning_rate is not None:
            self._optimizer.set_learning_rate(learning_rate)

    def begin_with(self, checkpoints: Path, *, step: int, version: int) -> None:
        """Take up masters, moments and schedule of another run's checkpoint, of the weights that this one starts from.

        Raises CheckpointError when the folder has no such checkpoint, or one of another model or that was changed.
        """
        require_whole(checkpoints, step=step, version=version)
        saving = self._group.saving
        source = CheckpointStore(checkpoints, keep=1, ranks=saving, group=self._group.saving_group)
        position = source.restore(self._optimizer, step=step, critic=self._critics)
        self._baselines = dict(position.baselines) if position else {}

    def train(self, rows: Sequence[TrainingRow]) -> StepMetrics:
        """Take one optimizer step on the `rows` of all ranks, of which these are this rank's, or skip it."""
        return train_step(
            self._policy,
            optimizer=self._optimizer,
            rows=rows,
            settings=self._settings,
            ranks=self._ranks,
            reference=self._reference,
            critic=self._critic,
            baselines=self._baselines,
            moved=self._moved,
        )

    def published_bytes(self) -> ModelBytes:
        """Return a copy of this rank's weights as they are published, and what they answer; it does not change until
        released.
        """
        with self._optimizer.as_published():
            copied = self._copies.take()
            return copied if self._prober is None else replace(copied, probe=self._prober.answers())

    @property
    def _critics(self) -> MasterOptimizer | None:
        """The critic's optimizer."""
        return None if self._critic is None else self._critic.optimizer

    @property
    def held(self) -> HeldPart:
        """Which part of the published tensors this rank publishes."""
        return self._copies.held

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of the next step."""
        return self._optimizer.peak_learning_rate

    def set_learning_rate(self, peak: float) -> None:
        """Change the peak from the next step on; checkpoints hold it."""
        self._optimizer.set_learning_rate(peak)

    def stage(self, *, step: int, version: int) -> Callable[[], object]:
        """Copy what a resume after `step` needs; what is returned makes that durable, called once, from any thread. A
        checkpoint of the step that exists learns the learning rate.
        """
        staged = self._checkpoints.stage(
            self._optimizer,
            step=step,
            version=version,
            baselines=self._baselines,
            critic=self._critics,
        )
        return partial(self._checkpoints.write, staged)


def _require_memory(
    policy: ResolvedPolicy,
    model_dir: Path,
    group: RankGroup,
    num_replicas: int,
    placement: Placement,
    snapshot: Where,
) -> None:
    """Raise InvalidArgumentError, before anything is loaded, where the GPU has no room for the state alone."""
    if group.device.type != "cuda" or policy.lora is not None:
        return
    plan = memory_plan(
        transformers.AutoConfig.from_pretrained(model_dir),
        policy.trainer,
        ranks=RankLayout(num_ranks=group.size, num_replicas=num_replicas),
        placement=placement,
        snapshot=snapshot,
        only_state=True,
    )
    _, num_bytes = torch.cuda.mem_get_info(group.device)
    plan.require_room(num_bytes, memory="device")


def _weight_source(
    policy: PolicyModel, *, publishes: bool, snapshot: Where
) -> WeightCopies | DetectedChanges:
    """On a GPU only what changed is copied; on a CPU the publishing thread compares faster than this one."""
    copies = WeightCopies(policy, publishes=publishes)
    if copies.held.device.type == "cpu":
        return copies
    return DetectedChanges(policy, publishes=publishes, snapshot=snapshot)


def _reference(
    algorithm: AlgorithmSettings, *, model_dir: Path, mesh: DeviceMesh, placement: Placement
) -> PolicyModel | None:
    """The model that a KL term compares with, frozen."""
    if algorithm.kl is None or not algorithm.kl.needs_model:
        return None
    return load_policy(model_dir, mesh=mesh, placement=placement, frozen=True).eval()


def _critic(
    training: TrainerSettings, *, model_dir: Path, mesh: DeviceMesh, placement: Placement
) -> Critic | None:
    """A critic that begins as the policy does, where the algorithm has one."""
    settings = training.algorithm.critic
    if settings is None:
        return None
    model = load_critic(model_dir, mesh=mesh, placement=placement).train()
    changes = {"learning_rate": settings.learning_rate, "average": None}
    optimizer = MasterOptimizer(model, settings=training.optimizer.model_copy(update=changes))
    return Critic(model=model, optimizer=optimizer, settings=settings)


def _require_fitting(
    policy: PolicyModel, *, reference: PolicyModel | None, training: TrainerSettings
) -> None:
    """Refuse a reference that does not know the policy's tokens, and to replay what a model has no routers for."""
    if reference is not None and reference.vocab_size < policy.vocab_size:
        raise InvalidArgumentError(
            f"the model of algorithm.kl.reference knows {reference.vocab_size} token ids, the policy has "
            f"{policy.vocab_size}: it cannot say how likely the others are; use one with the policy's tokenizer"
        )

    if training.router_replay and not policy.routers.shape.num_layers:
        raise InvalidArgumentError(
            "trainer.router_replay: the model has no routers that can replay what an engine chose; give a Qwen2-MoE or "
            "Qwen3-MoE, or leave it out"
        )


def _step_settings(training: TrainerSettings, *, plugins: StepPlugins, keep_logprobs: bool) -> StepSettings:
    return StepSettings(
        algorithm=training.algorithm,
        plugins=plugins,
        tokens_per_microbatch=training.tokens_per_microbatch,
        gradient_sync=training.gradient_sync,
        keep_logprobs=keep_logprobs,
    )
