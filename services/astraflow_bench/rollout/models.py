"""Models with random weights, and what they are asked: the same for every engine.

Invariant: no model has an end token, so every sequence has exactly as many tokens as were asked for, and one that is
shorter has lost some. Called by the measurements of this room.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

_SHORTEST_PROMPT, LONGEST_PROMPT = 20, 30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model by the names of its config; the rest is that of the quickstart."""

    hidden_size: int = 128
    intermediate_size: int = 320
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32


QUICKSTART = Shape()
SMALL = Shape(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64,
)  # fmt: skip
"""20 M weights: its passes take as long as those of a real model on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Every group is one prompt sampled `group_size` times, each sample to exactly `num_new_tokens`."""

    prompts: tuple[tuple[int, ...], ...]
    group_size: int
    num_new_tokens: int

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The prompt of each sequence."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]

    @property
    def num_tokens(self) -> int:
        """Generated tokens of one run."""
        return len(self.prompts) * self.group_size * self.num_new_tokens


def save_model(folder: Path, shape: Shape, *, seed: int = 0, vocab_size: int = 400) -> Path:
    """Write a checkpoint in bf16."""
    config = Qwen3Config(
        **asdict(shape),
        vocab_size=vocab_size,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def prompts(count: int, *, vocab_size: int, seed: int = 1) -> Iterator[tuple[int, ...]]:
    """Random prompts of 20 to 30 tokens."""
    draw = torch.Generator().manual_seed(seed)
    for length in torch.randint(_SHORTEST_PROMPT, LONGEST_PROMPT + 1, (count,), generator=draw).tolist():
        yield tuple(torch.randint(3, vocab_size, (length,), generator=draw).tolist())
