"""What is trained: a model of Qwen3's form with random weights, and rows of given lengths.

Invariant: everything comes from the sizes and fixed seeds, so that all methods compute the same step.
Used by every measurement of this room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from astraflow.plugins import VersionSpan
from astraflow.recipe import OptimizerSettings
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_trainer.batches.rows import RowOrigin, TrainingRow
from astraflow_trainer.model.model import ModelShape, PolicyModel, build_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import shard
from astraflow_trainer.ranks.group import RankGroup, join_rank_group
from astraflow_trainer.settings import RankSettings

__all__ = ["geometric_lengths", "model_shape", "one_rank", "outlier_lengths", "rows_of", "trained_policy"]

VOCAB_SIZE = 8192
_HEAD_DIM = 64
_GROUP = 4


def model_shape(sizes: TrainerSizes) -> ModelShape:
    """About 29 million parameters for a width of 512 and 8 layers."""
    heads = sizes.hidden // _HEAD_DIM
    return ModelShape(
        vocab_size=VOCAB_SIZE,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=_HEAD_DIM,
        intermediate_size=3 * sizes.hidden,
        max_position_embeddings=32_768,
    )


def geometric_lengths(num_rows: int, *, median: int) -> list[int]:
    """Evenly spread quantiles of a geometric distribution, in random order: p99 is log 100 / log 2 = 6.6 × p50."""
    share = (np.arange(num_rows) + 0.5) / num_rows
    lengths = np.maximum(4, np.ceil(-median * np.log2(1 - share))).astype(int)
    return list(np.random.default_rng(0).permutation(lengths).tolist())


def outlier_lengths(num_rows: int, *, median: int, outlier: int) -> list[int]:
    """Rows of the median, and a long one in the middle."""
    lengths = [median] * num_rows
    lengths[num_rows // 2] = outlier
    return lengths


def rows_of(lengths: Sequence[int]) -> list[TrainingRow]:
    """A row of each length, in groups of about four, none with an advantage of 0; the last three quarters are trained.

    Their log-probs lie around what a model of random weights says.
    """
    generator = np.random.default_rng(1)
    num_groups = max(1, len(lengths) // _GROUP)
    rows = []
    for index, length in enumerate(lengths):
        prompt = max(1, length // 4)
        mask = np.arange(length) >= prompt
        logprobs = np.zeros(length, dtype=np.float32)
        logprobs[mask] = -np.log(VOCAB_SIZE) + 0.1 * generator.standard_normal(length - prompt)
        row = TrainingRow(
            trajectory_id=f"t{index}",
            origin=RowOrigin(f"task-{index % num_groups}"),
            token_ids=generator.integers(0, VOCAB_SIZE, length).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=logprobs,
            version_spans=(VersionSpan(prompt, length, 0),),
            # The mean of different powers of two is none of them.
            reward=float(2 ** (index // num_groups)),
            temperature=1.0,
        )
        rows.append(row)
    return rows


def one_rank() -> RankGroup:
    """The group of this process alone."""
    return join_rank_group(RankSettings(), timeout_s=60.0)


def trained_policy(sizes: TrainerSizes, group: RankGroup) -> PolicyModel:
    """The model as a trainer of these ranks has it."""
    policy = PolicyModel(build_causal_lm(model_shape(sizes), seed=0)).train()
    shard(policy, mesh=init_device_mesh("cpu", (group.size,)))
    return policy


def optimizer_of(policy: PolicyModel) -> MasterOptimizer:
    """AdamW with the settings that a recipe has without any."""
    return MasterOptimizer(policy, settings=OptimizerSettings())


def num_parameters(policy: PolicyModel) -> int:
    """Of the whole model, over all ranks."""
    return sum(parameter.numel() for parameter in policy.parameters())


def same_numbers(numbers: Sequence[float], *, what: str) -> None:
    """Raise AssertionError unless all methods found the same; fp32 sums differ in their order."""
    if not torch.allclose(torch.tensor(numbers), torch.tensor(numbers[0]), rtol=1e-3):
        raise AssertionError(f"{what} differs between the methods: {numbers}")
