"""The public codec functions, over models given as `Mapping[str, np.ndarray]`.

Invariant: exact for every bit pattern; bytes that are not what they claim raise CorruptPart and change
nothing. Trainers, nodes and tools import from here.
"""

from astraflow_weights.codec.delta import DeltaSummary, apply_delta, encode_delta, summarize_delta
from astraflow_weights.codec.merge import invert_delta, merge_deltas
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.snapshot import decode_snapshot, encode_snapshot
from astraflow_weights.codec.tensors import Array, Model
from astraflow_weights.errors import CorruptPart, ModelMismatch, NeedsBase

__all__ = [
    "Array",
    "CorruptPart",
    "DeltaSummary",
    "Model",
    "ModelMismatch",
    "NeedsBase",
    "Schema",
    "apply_delta",
    "decode_snapshot",
    "encode_delta",
    "encode_snapshot",
    "invert_delta",
    "merge_deltas",
    "summarize_delta",
]
