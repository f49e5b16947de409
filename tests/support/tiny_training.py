"""A tiny policy's shape and rows to train it on, shared by the trainer's tests."""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from astraflow.plugins import VersionSpan
from astraflow_trainer.batches.rows import RowOrigin, TrainingRow
from astraflow_trainer.model.model import ModelShape, PolicyModel, local_part

VOCAB = 32
TINY = ModelShape(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
    initializer_range=0.3,
)

MakePolicy = Callable[..., PolicyModel]


def make_row(
    prompt: list[int],
    completion: list[int],
    *,
    logprobs: list[float] | None = None,
    reward: float = 0.0,
    group: str | RowOrigin = "g",
    name: str = "t",
    temperature: float = 1.0,
    truncated: bool = False,
) -> TrainingRow:
    """A row of prompt and completion ids; log-probs default to −1."""
    num_tokens = len(prompt) + len(completion)
    mask = np.arange(num_tokens) >= len(prompt)
    behavior = np.zeros(num_tokens, dtype=np.float32)
    behavior[mask] = [-1.0] * len(completion) if logprobs is None else logprobs
    return TrainingRow(
        trajectory_id=name,
        origin=RowOrigin(group) if isinstance(group, str) else group,
        token_ids=np.asarray(prompt + completion, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=behavior,
        version_spans=(VersionSpan(len(prompt), num_tokens, 0),),
        reward=reward,
        temperature=temperature,
        truncated=truncated,
    )


def make_rows(*, num_rows: int = 12, seed: int = 0) -> list[TrainingRow]:
    """Random rows in groups of four, whose log-probs lie around what a tiny model would say."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        prompt = generator.integers(0, VOCAB, int(generator.integers(1, 6))).tolist()
        completion = generator.integers(0, VOCAB, int(generator.integers(1, 9))).tolist()
        row = make_row(
            prompt,
            completion,
            logprobs=(-3.5 + 0.5 * generator.standard_normal(len(completion))).tolist(),
            reward=float(generator.integers(0, 4)) + index % 4,
            group=f"g{index // 4}",
            name=f"t{index}",
            temperature=(1.0, 0.7)[index % 2],
        )
        rows.append(row)
    return rows


def copies(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor, as it is now."""
    return {name: local_part(tensor).detach().clone() for name, tensor in tensors}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same tensors."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
