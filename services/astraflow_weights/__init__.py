"""The weight path: codec, parts, manifests, object stores and the planner; numpy and bytes, never torch.

What is exported is the codec over whole models, as docs/weights.md documents it.
"""

from astraflow_weights.codec import (
    apply_delta,
    decode_snapshot,
    encode_delta,
    encode_snapshot,
    invert_delta,
    merge_deltas,
    summarize_delta,
)

__all__ = [
    "apply_delta",
    "decode_snapshot",
    "encode_delta",
    "encode_snapshot",
    "invert_delta",
    "merge_deltas",
    "summarize_delta",
]
