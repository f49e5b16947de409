"""Per-token columns: numpy views over the little-endian bytes of a `Trajectory` message, and back.

Decoding copies nothing: the arrays are read-only views of the message's bytes. Encoding checks lengths once,
here, so that nodes and foreign tools cannot produce a message whose columns disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import InvalidTrajectoryError
from astraflow.rollout.v1 import trajectory_pb2

__all__ = ["Columns", "as_logprobs", "decode_columns", "encode_columns", "pack_mask", "unpack_mask"]

_F32 = trajectory_pb2.LOGPROB_DTYPE_F32
_BF16 = trajectory_pb2.LOGPROB_DTYPE_BF16
_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True)
class Columns:
    """The columns of one trajectory of T tokens."""

    token_ids: NDArray[np.int32]
    """int32[T]."""
    loss_mask: NDArray[np.bool_]
    """bool[T]; True where the token is trained on."""
    logprobs: NDArray[np.float32]
    """float32[T], natural log; 0 where the mask is False."""
    version_spans: tuple[tuple[int, int, int], ...]
    """(start, end, version), ascending; together they cover every masked position."""


def encode_columns(columns: Columns, *, trajectory_id: str) -> trajectory_pb2.Trajectory:
    """Return the message for `columns`. Raises InvalidTrajectoryError when lengths differ."""
    num_tokens = len(columns.token_ids)
    lengths = {
        "token_ids": num_tokens,
        "loss_mask": len(columns.loss_mask),
        "logprobs": len(columns.logprobs),
    }
    if len(set(lengths.values())) != 1 or num_tokens == 0:
        raise InvalidTrajectoryError(
            f"columns of {trajectory_id} must have one length ≥ 1, got {lengths}",
            metadata={"reason": "length_mismatch"},
        )
    return trajectory_pb2.Trajectory(
        trajectory_id=trajectory_id,
        token_ids=np.ascontiguousarray(columns.token_ids, dtype="<i4").tobytes(),
        logprob_dtype=_F32,
        logprobs=np.ascontiguousarray(columns.logprobs, dtype="<f4").tobytes(),
        loss_mask=pack_mask(columns.loss_mask),
        version_spans=[
            trajectory_pb2.VersionSpan(start=start, end=end, version=version)
            for start, end, version in columns.version_spans
        ],
    )


def decode_columns(message: trajectory_pb2.Trajectory) -> Columns:
    """Return views over `message`. Raises InvalidTrajectoryError when the columns' lengths disagree."""
    token_ids = np.frombuffer(_whole(message.token_ids, 4, "token_ids", message.trajectory_id), dtype="<i4")
    is_half = message.logprob_dtype == _BF16
    raw = _whole(message.logprobs, 2 if is_half else 4, "logprobs", message.trajectory_id)
    logprobs = as_logprobs(raw, is_half=is_half)
    num_tokens = len(token_ids)
    if len(logprobs) != num_tokens or len(message.loss_mask) != (num_tokens + 7) // 8:
        raise InvalidTrajectoryError(
            f"trajectory {message.trajectory_id}: {num_tokens} token ids, {len(logprobs)} log-probs "
            f"and {len(message.loss_mask)} mask bytes do not belong together; "
            f"expected equal counts and {(num_tokens + 7) // 8} mask bytes",
            metadata={"reason": "length_mismatch"},
        )
    spans = tuple((span.start, span.end, span.version) for span in message.version_spans)
    return Columns(token_ids, unpack_mask(message.loss_mask, num_tokens), logprobs, spans)


def as_logprobs(raw: bytes, *, is_half: bool) -> NDArray[np.float32]:
    """Return float32[T] from whole little-endian binary32 values, or bfloat16 ones, which are widened exactly."""
    if is_half:
        return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, dtype=_FLOAT32)


def pack_mask(mask: Sequence[bool] | NDArray[np.bool_]) -> bytes:
    """Return ceil(T / 8) bytes, least significant bit first."""
    return np.packbits(np.asarray(mask, dtype=bool), bitorder="little").tobytes()


def unpack_mask(packed: bytes, num_tokens: int) -> NDArray[np.bool_]:
    """Return bool[num_tokens] from packed bits."""
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=num_tokens, bitorder="little").view(
        bool
    )


def _whole(raw: bytes, width: int, name: str, trajectory_id: str) -> bytes:
    if len(raw) % width:
        raise InvalidTrajectoryError(
            f"trajectory {trajectory_id}: {name} holds {len(raw)} bytes, not a multiple of {width}",
            metadata={"reason": "length_mismatch"},
        )
    return raw
