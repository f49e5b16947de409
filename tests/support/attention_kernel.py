"""What a kernel for attention within pieces computes, piece by piece: slow, and on any device."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from astraflow_trainer.model.attention import Reading


def piece_by_piece(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, reading: Reading
) -> torch.Tensor:
    """As `attention.Kernel`."""
    lengths = reading.borders_P1.diff().cpu().tolist()
    assert max(lengths) == reading.longest
    assert sum(lengths) == len(query_THD)
    columns = (query_THD, key_TKD, value_TKD)
    read = []
    for parts in zip(*(column.split(lengths) for column in columns), strict=True):
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        length = query.shape[2]
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        if reading.window is not None:
            allowed = allowed.triu(1 - reading.window)
        heads = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            scale=reading.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        read.append(heads[0].transpose(0, 1))
    return torch.cat(read)
