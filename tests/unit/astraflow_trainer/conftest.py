"""Rows, tiny models and a one-process mesh shared by the trainer's tests."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from astraflow.plugins import VersionSpan
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel, Qwen3Shape, build_causal_lm, shard

VOCAB = 32
TINY = Qwen3Shape(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
    initializer_range=0.3,
)

MakeRow = Callable[..., TrainingRow]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A CPU mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def make_policy(mesh: DeviceMesh) -> Callable[..., PolicyModel]:
    """Builds a tiny policy, sharded unless told otherwise; equal seeds give equal weights."""

    def make(*, seed: int = 0, sharded: bool = True, intermediate_size: int = 32) -> PolicyModel:
        shape = replace(TINY, intermediate_size=intermediate_size)
        policy = PolicyModel(build_causal_lm(shape, seed=seed))
        if sharded:
            shard(policy, mesh=mesh)
        return policy

    return make


@pytest.fixture
def make_row() -> MakeRow:
    """Builds a row from prompt and completion ids; log-probs default to −1."""

    def make(
        prompt: list[int],
        completion: list[int],
        *,
        logprobs: list[float] | None = None,
        reward: float = 0.0,
        group: str = "g",
        name: str = "t",
        temperature: float = 1.0,
        version: int = 0,
    ) -> TrainingRow:
        num_tokens = len(prompt) + len(completion)
        mask = np.arange(num_tokens) >= len(prompt)
        behavior = np.zeros(num_tokens, dtype=np.float32)
        behavior[mask] = [-1.0] * len(completion) if logprobs is None else logprobs
        return TrainingRow(
            trajectory_id=name,
            group_id=group,
            token_ids=np.asarray(prompt + completion, dtype=np.int32),
            loss_mask=mask,
            behavior_logprobs=behavior,
            version_spans=(VersionSpan(len(prompt), num_tokens, version),),
            reward=reward,
            temperature=temperature,
        )

    return make


@pytest.fixture
def make_rows(make_row: MakeRow) -> Callable[..., list[TrainingRow]]:
    """Builds random rows in groups of four, whose log-probs lie around what a tiny model would say."""

    def make(*, num_rows: int = 12, seed: int = 0, noise: float = 0.5) -> list[TrainingRow]:
        generator = np.random.default_rng(seed)
        rows = []
        for index in range(num_rows):
            prompt = generator.integers(0, VOCAB, int(generator.integers(1, 6))).tolist()
            completion = generator.integers(0, VOCAB, int(generator.integers(1, 9))).tolist()
            rows.append(
                make_row(
                    prompt,
                    completion,
                    logprobs=(-3.5 + noise * generator.standard_normal(len(completion))).tolist(),
                    reward=float(generator.integers(0, 4)) + index % 4,
                    group=f"g{index // 4}",
                    name=f"t{index}",
                    temperature=(1.0, 0.7)[index % 2],
                )
            )
        return rows

    return make
