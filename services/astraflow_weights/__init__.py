"""The weight path: codec, parts, manifests, object stores and the planner; numpy and bytes, never torch.

What is exported is the codec over whole models, as docs/weights.md documents it. It is imported when it is first used:
the settings of daemons lie in this package too, and `--help` does not wait for numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from astraflow_weights.codec import (
        Schema,
        apply_delta,
        decode_snapshot,
        encode_delta,
        encode_snapshot,
        invert_delta,
        merge_deltas,
        summarize_delta,
    )

__all__ = [
    "Schema",
    "apply_delta",
    "decode_snapshot",
    "encode_delta",
    "encode_snapshot",
    "invert_delta",
    "merge_deltas",
    "summarize_delta",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("astraflow_weights.codec"), name)
