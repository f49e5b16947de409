"""Tiny random Llama, Qwen2 and Qwen3 checkpoints, and transformers' forward pass on them as the reference.

Weights are saved in bf16 as a trainer publishes them; the reference computes in fp32 on those rounded weights,
which is what the engine promises to agree with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

VOCAB_SIZE = 97
EOS = 2


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """What varies between tests; the rest is fixed."""

    model_type: str = "qwen3"
    tied: bool = True
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    num_layers: int = 2
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 128
    intermediate_size: int = 48
    rope: Mapping[str, object] = field(default_factory=lambda: {"rope_type": "default"})
    more: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the configuration."""


def save_tiny_model(
    folder: Path, *, seed: int = 0, shape: TinyShape | None = None, max_shard_size: str = "5GB"
) -> Path:
    """Write a random checkpoint, the same for the same seed and shape."""
    shape = shape or TinyShape()
    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=shape.vocab_size,
        hidden_size=32,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied,
        # Wide enough that the distribution has clear favourites and a swap of weights changes them.
        initializer_range=0.3,
        rope_parameters={"rope_theta": 10_000.0, **shape.rope},
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        **shape.more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Norm weights are all ones after initialization, biases zero: a pass that forgot them would still agree.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.bfloat16().save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def save_tiny_adapter(
    folder: Path,
    *,
    model: Path,
    seed: int = 0,
    rank: int = 4,
    target_modules: str | list[str] = "all-linear",
) -> Path:
    """Write a LoRA adapter of random numbers as peft does."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=target_modules, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(load_reference(model), config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                # B is zero after initialization: an engine that forgot it would still agree.
                torch.nn.init.normal_(parameter, std=0.3)
    adapted.bfloat16().save_pretrained(str(folder))
    return folder


def load_adapted_reference(folder: Path, *, model: Path) -> PreTrainedModel:
    """peft's model in fp32 on the bf16 weights of both."""
    import peft

    adapted = peft.PeftModel.from_pretrained(load_reference(model), str(folder), autocast_adapter_dtype=False)
    # It answers as the model that it adapts does.
    return cast("PreTrainedModel", adapted.float().eval())


def load_reference(folder: Path) -> PreTrainedModel:
    """transformers' model in fp32 on the checkpoint's bf16 weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.float().eval()
    return model


def widened(bits: npt.NDArray[np.uint16]) -> torch.Tensor:
    """Bf16 bit patterns as the fp32 numbers they are."""
    return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32).copy())


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Log-prob of each generated token given everything before it, one forward pass over the whole."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return [float(logprobs[index, token]) for index, token in enumerate(tokens)]


@torch.no_grad()
def reference_greedy(model: PreTrainedModel, prompt: Sequence[int], *, num_tokens: int) -> list[int]:
    """Greedy continuation, ignoring end tokens, without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def reference_greedy_across_swap(
    before: PreTrainedModel,
    after: PreTrainedModel,
    prompt: Sequence[int],
    *,
    num_before: int,
    num_after: int,
) -> tuple[list[int], list[float]]:
    """Greedy tokens and log-probs when weights change after `num_before` tokens and old keys and values stay."""
    cache = DynamicCache()
    fed, tokens, logprobs = list(prompt), [], []
    for index in range(num_before + num_after):
        model = before if index < num_before else after
        logits = model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
        token = int(logits.argmax())
        tokens.append(token)
        logprobs.append(float(torch.log_softmax(logits, dim=-1)[token]))
        fed = [token]
    return tokens, logprobs


def matrix_of(linear: Callable[[torch.Tensor], torch.Tensor], *, num_inputs: int) -> torch.Tensor:
    """The matrix [outputs, inputs] of a product without a bias, bit by bit."""
    return linear(torch.eye(num_inputs)).T
