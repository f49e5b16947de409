"""The forward pass of a dense decoder on a static cache, in fp32, written for many short rows on one CPU core.

Owns the arithmetic and nothing else: which rows run, and at which positions, is decided by the caller. Llama,
Qwen2 and Qwen3 differ in biases and in the norm of queries and keys: what a version has no tensor for is left out. Two
passes exist: `extend` writes several new tokens per row (prompts, recomputation) and `decode` one token for
each of some rows without copying their cache. Both return the hidden state before the output head.
Called by the scheduler thread only, under `torch.inference_mode`.

Shape legend: B rows, N new tokens, D hidden, Q heads, K kv heads, G = Q / K, H head_dim, T cached length, V
vocabulary.
"""

import torch
import torch.nn.functional as F

from astraflow_engine.adapters import RowAdapters
from astraflow_engine.kv_cache import KvCache
from astraflow_engine.model_config import ModelConfig
from astraflow_engine.rotary import RotaryTable
from astraflow_engine.weights import LayerWeights, Weights

_PLAIN = RowAdapters(())


class Decoder:
    """Sizes and rotary table of one model; the tensors of a version are passed to each pass."""

    def __init__(self, config: ModelConfig, *, num_positions: int) -> None:
        self._config = config
        # One more position than the cache holds: the dump column has a (meaningless) rotation too.
        self._rotary = RotaryTable(config.rope, head_dim=config.head_dim, num_positions=num_positions + 1)

    def decode(
        self,
        weights: Weights,
        cache: KvCache,
        *,
        tokens_B: torch.Tensor,
        positions_B: torch.Tensor,
        rows_B: torch.Tensor,
        length: int,
        adapters: RowAdapters = _PLAIN,
    ) -> torch.Tensor:
        """One token for each of the rows, in ascending order; returns hidden states [B, D].

        `positions_B` int64 is where the token stands and its key goes, and `length` exceeds every position.
        """
        config = self._config
        hidden = F.embedding(tokens_B, weights.embedding_VD)
        rotation = self._rotary.at(positions_B)
        places = cache.places(rows_B, positions_B)
        # Attention alone runs over idle rows below the last one as well, in place of a copy of all keys and values.
        num_rows = int(rows_B[-1]) + 1
        has_idle = len(rows_B) < num_rows
        reach = (
            positions_B.new_zeros(num_rows).index_copy_(0, rows_B, positions_B) if has_idle else positions_B
        )
        mask = _reach_mask(reach, length=length)[:, None, None]
        groups = config.num_heads // config.num_kv_heads
        for index, weights_of in enumerate(weights.layers):
            layer = _Layer(weights_of, adapters, index)
            queries, keys, values = self._project(hidden, layer, rotation=rotation)
            cache.write(index, places, keys=keys, values=values)
            cached_keys, cached_values = cache.leading_rows(index, num_rows=num_rows, length=length)
            # Heads of one group share keys: as query length they become one plain batched product.
            grouped = queries.reshape(-1, config.num_kv_heads, groups, config.head_dim)
            if has_idle:
                grouped = grouped.new_zeros(num_rows, *grouped.shape[1:]).index_copy_(0, rows_B, grouped)
            mixed = F.scaled_dot_product_attention(grouped, cached_keys, cached_values, attn_mask=mask)
            mixed = mixed.reshape(num_rows, -1)
            hidden = self._finish_layer(hidden, mixed[rows_B] if has_idle else mixed, layer)
        return self._norm(hidden, weights.norm_D)

    def extend(
        self,
        weights: Weights,
        cache: KvCache,
        *,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        write_at_BN: torch.Tensor,
        rows_B: torch.Tensor,
        length: int,
        adapters: RowAdapters = _PLAIN,
    ) -> torch.Tensor:
        """N new tokens for the rows named; returns hidden states [B, N, D], padding included.

        `positions_BN` ascends within a row; padding is written to the dump column through `write_at_BN`.
        """
        config = self._config
        num_rows, num_new = tokens_BN.shape
        hidden = F.embedding(tokens_BN, weights.embedding_VD)
        rotation = self._rotary.at(positions_BN)
        mask = _reach_mask(positions_BN, length=length)[:, None]
        places = cache.places(rows_B, write_at_BN)
        for index, weights_of in enumerate(weights.layers):
            layer = _Layer(weights_of, adapters, index)
            queries, keys, values = self._project(hidden, layer, rotation=rotation)
            cache.write(index, places, keys=keys, values=values)
            cached_keys, cached_values = cache.gathered_rows(index, rows_B=rows_B, length=length)
            mixed = F.scaled_dot_product_attention(
                queries.transpose(1, 2), cached_keys, cached_values, attn_mask=mask,
                enable_gqa=config.num_heads != config.num_kv_heads,
            )  # fmt: skip
            hidden = self._finish_layer(hidden, mixed.transpose(1, 2).reshape(num_rows, num_new, -1), layer)
        return self._norm(hidden, weights.norm_D)

    def _project(
        self, hidden: torch.Tensor, layer: "_Layer", *, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [..., Q, H] and keys [..., K, H], normed before where the model does, and values
        [..., K, H].
        """
        config = self._config
        normed = self._norm(hidden, layer.weights.attention_norm_D)
        num_rotated = config.num_heads + config.num_kv_heads
        heads = layer.product("qkv", normed).unflatten(
            -1, (num_rotated + config.num_kv_heads, config.head_dim)
        )
        rotated, values = heads.split([num_rotated, config.num_kv_heads], dim=-2)
        if layer.weights.query_key_norm is not None:
            rotated = _rms_norm(rotated, layer.weights.query_key_norm, eps=config.rms_norm_eps)
        cosines, signed_sines = rotation
        # In place here and below: large fresh temporaries cost more in page faults than in sums.
        swapped = rotated.roll(config.head_dim // 2, dims=-1)
        rotated = rotated.mul_(cosines).addcmul_(swapped, signed_sines)
        queries, keys = rotated.split([config.num_heads, config.num_kv_heads], dim=-2)
        return queries, keys, values

    def _finish_layer(self, hidden: torch.Tensor, mixed: torch.Tensor, layer: "_Layer") -> torch.Tensor:
        """Attention output, residual, gated feed-forward, residual."""
        hidden = layer.product("output", mixed).add_(hidden)
        normed = self._norm(hidden, layer.weights.mlp_norm_D)
        gate, up = layer.product("gate_up", normed).chunk(2, dim=-1)
        return layer.product("down", F.silu(gate).mul_(up)).add_(hidden)

    def _norm(self, hidden: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return _rms_norm(hidden, weight_D, eps=self._config.rms_norm_eps)


class _Layer:
    """The weights of one layer, and what the adapters of the rows add to its products."""

    __slots__ = ("_adapters", "_index", "weights")

    def __init__(self, weights: LayerWeights, adapters: RowAdapters, index: int) -> None:
        self.weights = weights
        self._adapters = adapters
        self._index = index

    def product(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """[B, ..., I] to [B, ..., O], fresh memory."""
        product: torch.Tensor = getattr(self.weights, name)(values)
        return self._adapters.add(product, values, layer=self._index, name=name)


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis. On CPU half the cost of `F.rms_norm`, which is not fused
    there."""
    length: torch.Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale = length.square_().mul_(1.0 / hidden.shape[-1]).add_(eps).rsqrt_()
    return (hidden * scale).mul_(weight)


def _reach_mask(positions: torch.Tensor, *, length: int) -> torch.Tensor:
    """Additive mask [*positions.shape, length]: 0 up to and including each position, -inf beyond."""
    beyond = torch.arange(length) > positions.unsqueeze(-1)
    return torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
