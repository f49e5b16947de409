"""The ranks of `test_reductions.py`: runs of one rank, of two, and of two replicas of two take the same steps on the
same rows.

Each rank is a process that meets the others as a trainer's ranks do, trains on its share of the rows,
publishes its shards into a store, saves a checkpoint, and takes up another run's. What every rank has in
the end is left in files. One process imports torch and forks all ranks: importing costs most of the test.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from astraflow import recipe
from astraflow.recipe.advantage import Rae
from astraflow.recipe.algorithm import AlgorithmSettings, M2po
from astraflow_kit.lifecycle import exit_code_of
from astraflow_kit.plugins import RecipeSource
from astraflow_kit.ports import free_port
from astraflow_trainer.batches.rank_batches import balanced_shares
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.checkpoint import CheckpointStore
from astraflow_trainer.model.model import PolicyModel, load_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import Placement, shard
from astraflow_trainer.publish.change_detection import DetectedChanges
from astraflow_trainer.publish.loading import load_critic
from astraflow_trainer.publish.published import WeightCopies
from astraflow_trainer.ranks.group import RankGroup, join_rank_group
from astraflow_trainer.ranks.mesh import from_first_replica, rank_mesh, replica_of
from astraflow_trainer.ranks.watch import RankLostError
from astraflow_trainer.settings import RankSettings
from astraflow_trainer.step.critic import Critic
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.step.step import StepMetrics, StepSettings, train_step
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store import file, layout
from support import docs_code, tiny_models, tiny_training

VOCAB_SIZE = 33  # odd, so that two ranks hold different numbers of rows
NUM_STEPS = 4
OWN_STEP = 3
OURS = AlgorithmSettings(loss=M2po(budget=0.02, floor_low=0.0, floor_high=0.0))
OWN = AlgorithmSettings.model_validate({"loss": "recipe:OffPolicyMask", "advantage": "recipe:LengthWeighted"})
"""The documented plug-ins, which one step takes."""
RUNNING_STEPS = (2, NUM_STEPS + 1)
RUNNING = OURS.model_copy(update={"advantage": Rae()})
"""With a running baseline, before the checkpoint and after it."""
REPLICAS = {1: 1, 2: 1, 4: 2}
"""Of the runs, by their number of ranks."""
TAKES_UP = {1: 4, 2: 1, 4: 2}
"""Whose checkpoint a run goes on from."""
RULES = {
    "adamw_8bit": recipe.OptimizerSettings(
        kind="adamw_8bit", learning_rate=1e-2, average=recipe.AverageSettings()
    ),
    "muon": recipe.OptimizerSettings(kind="muon", learning_rate=1e-2, weight_decay=0.1),
}
"""What takes steps on gradients that do not depend on the number of ranks."""


def make_rows(seed: int) -> list[TrainingRow]:
    """Thirteen rows in three groups, which are spread over both ranks."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(13):
        num_tokens = int(generator.integers(3, 10))
        logprobs = -3.5 + 0.5 * generator.standard_normal(num_tokens)
        ids = generator.integers(0, VOCAB_SIZE, num_tokens).tolist()
        row = tiny_training.make_row(
            ids[:2],
            ids[2:],
            logprobs=logprobs[2:].tolist(),
            reward=float(generator.integers(0, 3)),
            group=f"g{index % 3}",
            name=f"t{index}",
        )
        rows.append(row)
    return rows


class Rank:
    """One rank of a run."""

    def __init__(self, group: RankGroup, model: Path) -> None:
        self.group = group
        code, pages = model.parent / f"code-{group.index}", ("plugins/loss.md", "plugins/advantage.md")
        self.source = RecipeSource(folder=docs_code.recipe_folder(code, *pages))
        self.policy = PolicyModel(load_causal_lm(model))
        self.mesh = rank_mesh(group.device, num_ranks=group.size, num_replicas=REPLICAS[group.size])
        self.publishes = replica_of(self.mesh) == 0
        shard(self.policy, mesh=self.mesh)
        # A learning rate that moves every weight by many ulps, and an eps that keeps steps proportional to
        # gradients: Adam would turn a last bit of a tiny gradient into a whole step.
        settings = recipe.OptimizerSettings(learning_rate=1e-2, eps=1e-3)
        self.optimizer = MasterOptimizer(self.policy, settings=settings)
        self.baselines: dict[str, float] = {}

    def step(self, seed: int) -> StepMetrics:
        """Train on this rank's share of the batch."""
        rows = make_rows(seed)
        share = balanced_shares([row.num_tokens for row in rows], num_ranks=self.group.size)
        algorithm = OWN if seed == OWN_STEP else RUNNING if seed in RUNNING_STEPS else OURS
        plugins = StepPlugins.made(algorithm, source=self.source)
        settings = StepSettings(algorithm=algorithm, plugins=plugins, tokens_per_microbatch=20)
        return train_step(
            self.policy,
            optimizer=self.optimizer,
            rows=[rows[position] for position in share[self.group.index]],
            settings=settings,
            ranks=self.group.training,
            baselines=self.baselines,
        )

    def checkpoints(self, folder: Path) -> CheckpointStore:
        """Checkpoints that all ranks share."""
        return CheckpointStore(folder, keep=9, ranks=self.group.saving, group=self.group.saving_group)

    def state(self) -> dict[str, np.ndarray]:
        """This rank's part of masters and moments."""
        parts = tiny_training.copies(self.optimizer.state().items())
        return {name: part.numpy() for name, part in parts.items()}


def publisher(group: RankGroup, folder: Path) -> ShardPublisher:
    """This rank's publisher into the run's own store."""
    store = file.FileStore(folder / f"store-{group.size}")
    writer = VersionWriter.open(store, run_id="run", policy_id="p", epoch=1) if group.index == 0 else None
    uploads = writer.uploads if writer else Uploads(store, keys=layout.PolicyKeys("run", "p"), threads=1)
    return ShardPublisher(writer, uploads=uploads, peers=group.publishing, base=None)


def train(settings: RankSettings, folder: Path) -> None:
    """Take the steps, publish each, and save a checkpoint."""
    torch.set_num_threads(1)
    group = join_rank_group(settings, timeout_s=60.0)
    rank, versions = Rank(group, folder / "model"), publisher(group, folder)
    kind = WeightCopies if group.size == 1 else DetectedChanges
    copies = kind(rank.policy, publishes=rank.publishes)
    taken = copies.take()
    root = versions.publish(taken.open(), step=0).model_root
    lines = []
    for step in range(1, NUM_STEPS + 1):
        metrics = rank.step(step)
        assert metrics.loss is not None
        lines.append([metrics.loss.loss, metrics.gradient_norm, metrics.clip_low, metrics.loss.num_tokens])
        taken.published(root)
        taken = copies.take()
        shards = taken.open()
        root = versions.publish(shards, step=step).model_root
    torch.manual_seed(100 + group.index)
    checkpoints = rank.checkpoints(folder / f"checkpoints-{group.size}")
    staged = checkpoints.stage(rank.optimizer, step=NUM_STEPS, version=NUM_STEPS, baselines=rank.baselines)
    checkpoints.write(staged)
    # As when an operator goes back to a version: all replicas take up what the first one has published.
    weights = copies.held.by_parameter(shards)
    for name in sorted(weights):
        from_first_replica(weights[name], mesh=rank.mesh)
    np.savez(
        folder / f"adopted-{group.size}-{group.index}.npz",
        **{name: part.view(torch.uint16).numpy() for name, part in weights.items()},
    )
    held = {"shards": shards.num_bytes, "whole": sum(spec.size_bytes for spec in shards.specs)}
    (folder / f"held-{group.size}-{group.index}.json").write_text(json.dumps(held))
    np.save(folder / f"metrics-{group.size}-{group.index}.npy", np.asarray(lines))
    np.savez(folder / f"state-{group.size}-{group.index}.npz", **rank.state())
    known_steps(group, folder, take_up=False)
    critic_steps(group, folder, rank.mesh)
    group.farewell(None)
    dist.destroy_process_group()


def critic_steps(group: RankGroup, folder: Path, mesh: DeviceMesh) -> None:
    """Two steps of PPO with a critic, a checkpoint of both, and that of the run of one rank taken up."""
    ppo = {"advantage": "gae", "loss": "ppo_clip", "critic": {"learning_rate": 1e-2}}
    algorithm = AlgorithmSettings.model_validate(ppo)
    assert algorithm.critic is not None
    policy = PolicyModel(load_causal_lm(folder / "model"))
    shard(policy, mesh=mesh)
    model = load_critic(folder / "model", mesh=mesh, placement=Placement())
    settings = recipe.OptimizerSettings(learning_rate=1e-2, eps=1e-3)
    optimizer, own = (MasterOptimizer(of, settings=settings) for of in (policy, model))
    critic, lines = Critic(model=model, optimizer=own, settings=algorithm.critic), []
    for step in (1, 2):
        rows = make_rows(step)
        share = balanced_shares([row.num_tokens for row in rows], num_ranks=group.size)[group.index]
        metrics = train_step(
            policy,
            optimizer=optimizer,
            rows=[rows[position] for position in share],
            settings=StepSettings(algorithm=algorithm, tokens_per_microbatch=20),
            ranks=group.training,
            critic=critic,
        )
        assert metrics.loss is not None
        lines.append([metrics.loss.loss, metrics.gradient_norm, *metrics.of_critic.values()])
    np.save(folder / f"critic-{group.size}-{group.index}.npy", np.asarray(lines))
    checkpoints = CheckpointStore(
        folder / f"critic-{group.size}", keep=9, ranks=group.saving, group=group.saving_group
    )
    checkpoints.write(checkpoints.stage(optimizer, step=2, version=2, critic=own))
    taken = copies_of(own)
    checkpoints.restore(optimizer, critic=own)
    assert tiny_training.same_bits(copies_of(own), taken)


def copies_of(optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    """This rank's part of what it keeps."""
    return tiny_training.copies(optimizer.state().items())


def known_steps(group: RankGroup, folder: Path, *, take_up: bool) -> None:
    """Two steps of every rule with random gradients, from the start or from the other run's checkpoint of them."""
    mesh = rank_mesh(group.device, num_ranks=group.size, num_replicas=REPLICAS[group.size])
    for kind, settings in RULES.items():
        policy = PolicyModel(load_causal_lm(folder / "model"))
        shard(policy, mesh=mesh)
        optimizer = MasterOptimizer(policy, settings=settings)
        size = TAKES_UP[group.size] if take_up else group.size
        checkpoints = CheckpointStore(
            folder / f"{kind}-{size}", keep=9, ranks=group.saving, group=group.saving_group
        )
        if take_up:
            checkpoints.restore(optimizer)
        generator = torch.Generator().manual_seed(int(take_up))
        for _ in range(2):
            for _, parameter in policy.hf_parameters():
                whole = torch.randn(parameter.shape, generator=generator)
                assert isinstance(parameter, DTensor)
                parameter.grad = distribute_tensor(whole, mesh, parameter.placements)
            optimizer.step(gradient_norm=1.0)
        parts = {name: part.numpy() for name, part in tiny_training.copies(optimizer.state().items()).items()}
        kept = "resumed" if take_up else "state"
        np.savez(folder / f"{kind}-{kept}-{group.size}-{group.index}.npz", **parts)
        if not take_up:
            checkpoints.write(checkpoints.stage(optimizer, step=2, version=2))


def resume(settings: RankSettings, folder: Path) -> None:
    """Take up the checkpoint of a run with another number of ranks, and go on for a step."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    group = join_rank_group(settings, timeout_s=60.0)
    rank = Rank(group, folder / "model")
    other = TAKES_UP[group.size]
    position = rank.checkpoints(folder / f"checkpoints-{other}").restore(rank.optimizer)
    assert position is not None
    assert (position.step, position.optimizer_steps) == (NUM_STEPS, NUM_STEPS)
    rank.baselines = dict(position.baselines)
    np.savez(folder / f"resumed-{group.size}-{group.index}.npz", **rank.state())
    np.save(folder / f"random-{group.size}-{group.index}.npy", torch.rand(4).numpy())
    metrics = rank.step(NUM_STEPS + 1)
    assert metrics.loss is not None
    numbers = np.asarray([metrics.loss.loss, metrics.gradient_norm])
    np.save(folder / f"next-{group.size}-{group.index}.npy", numbers)
    means = [fmean(row.reward for row in make_rows(step)) for step in RUNNING_STEPS]
    moved = [*position.baselines.items(), *rank.baselines.items(), means]
    (folder / f"baselines-{group.size}-{group.index}.json").write_text(json.dumps(moved))
    known_steps(group, folder, take_up=True)
    group.farewell(None)
    dist.destroy_process_group()


def lose(how: str, settings: RankSettings, folder: Path) -> None:
    """A step in which the second of two ranks goes away, or is there and takes no part; what the first makes of it."""
    group = join_rank_group(settings, timeout_s=10.0)
    assert group.watch is not None
    group.watch.start(on_lost=lambda _: None, on_stop_wanted=lambda: None)
    group.training.sum(torch.ones(1))
    if group.index == 1 and how == "dies":
        os._exit(0)
    if group.index == 1:
        with suppress(RankLostError):
            group.wait_for_value("the end of the first")
        os._exit(0)
    try:
        group.training.sum(torch.ones(1))
    except RuntimeError as error:
        reason = group.explain(error)
        said = {"kind": type(reason).__name__, "message": str(reason), "code": exit_code_of(reason)}
        (folder / f"lost-{how}.json").write_text(json.dumps(said))


def in_ranks(size: int, work: Callable[[RankSettings, Path], None], folder: Path) -> bool:
    """Fork `size` ranks; whether all ended well."""
    context = multiprocessing.get_context("fork")
    settings = RankSettings(world_size=size, master_addr="127.0.0.1", master_port=free_port())
    places = [settings.model_copy(update={"rank": rank}) for rank in range(size)]
    ranks = [context.Process(target=work, args=(place, folder), daemon=True) for place in places]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=100)
    return all(process.exitcode == 0 for process in ranks)


def main(folder: Path) -> int:
    """Run everything."""
    tiny_models.save_tiny_model(folder / "model", shape=tiny_models.TinyShape(vocab_size=VOCAB_SIZE))
    runs = [(size, work) for work in (train, resume) for size in REPLICAS]
    runs += [(2, partial(lose, how)) for how in ("dies", "takes no part")]
    return 0 if all(in_ranks(size, work, folder) for size, work in runs) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
