"""The ranks of `test_ranks.py`: each takes its share of the rows, trains, and saves what all ranks then have.

One process imports torch and forks all ranks of a run of one and of a run of two: importing costs most of the
test.
"""

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from astraflow.plugins import VersionSpan
from astraflow_trainer.checkpoint import CheckpointStore
from astraflow_trainer.losses import LossSettings, M2po
from astraflow_trainer.model import PolicyModel, Qwen3Shape, build_causal_lm, shard
from astraflow_trainer.optimizer import MasterOptimizer, OptimizerSettings
from astraflow_trainer.published import published_shards, published_tensors
from astraflow_trainer.ranks import GroupRanks
from astraflow_trainer.rows import TrainingRow
from astraflow_trainer.step import StepSettings, train_step

SHAPE = Qwen3Shape(
    vocab_size=33,  # odd, so that two ranks hold different numbers of rows
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
    initializer_range=0.3,
)


def make_rows(seed: int) -> list[TrainingRow]:
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(13):
        num_tokens = int(generator.integers(3, 10))
        mask = np.arange(num_tokens) >= 2
        logprobs = np.where(mask, -3.5 + 0.5 * generator.standard_normal(num_tokens), 0.0)
        rows.append(
            TrainingRow(
                trajectory_id=f"t{index}",
                group_id=f"g{index % 3}",
                token_ids=generator.integers(0, 33, num_tokens).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=logprobs.astype(np.float32),
                version_spans=(VersionSpan(0, num_tokens, 0),),
                reward=float(generator.integers(0, 3)),
                temperature=1.0,
            )
        )
    return rows


def train(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (size,))
    ranks = GroupRanks(mesh.get_group())
    policy = PolicyModel(build_causal_lm(SHAPE, seed=0))
    shard(policy, mesh=mesh)
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1e-2, eps=1e-3))
    settings = StepSettings(
        loss=LossSettings(trust_region=M2po(budget=0.02, floor_low=0.0, floor_high=0.0)),
        tokens_per_microbatch=20,
    )
    lines = []
    for seed in range(3):
        # Shares of different sizes, and groups that are spread over ranks.
        rows = make_rows(seed)
        border = 4 if size == 2 else len(rows)
        mine = rows[:border] if rank == 0 else rows[border:]
        metrics = train_step(policy, optimizer=optimizer, rows=mine, settings=settings, ranks=ranks)
        assert metrics.loss is not None
        lines.append([metrics.loss.loss, metrics.gradient_norm, metrics.clip_low, metrics.loss.num_tokens])
    checkpoints = CheckpointStore(folder / "checkpoints", keep=1, ranks=ranks, group=mesh.get_group())
    checkpoints.write(checkpoints.stage(optimizer, step=size, version=size))
    shards = {f"{shard.name}@{shard.first_row}": shard.bits for shard in published_shards(policy)}
    np.savez(folder / f"shards-{size}-{rank}.npz", **shards)
    whole = published_tensors(policy)
    if rank == 0:
        np.savez(folder / f"result-{size}.npz", metrics=np.asarray(lines), **whole)
    dist.destroy_process_group()


def main(folder: Path) -> int:
    context = multiprocessing.get_context("fork")
    for size in (1, 2):
        ranks = [
            context.Process(target=train, args=(rank, size, folder), daemon=True) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=60)
        if any(process.exitcode != 0 for process in ranks):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
