"""Columns survive the wire exactly, and messages whose columns disagree are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.columns import Columns, decode_columns, encode_columns, pack_mask, unpack_mask
from astraflow.errors import InvalidTrajectoryError
from astraflow.rollout.v1 import trajectory_pb2

TOKEN = st.tuples(st.integers(0, 2**31 - 1), st.booleans(), st.floats(-50, 0, width=32))
TOKENS = st.lists(TOKEN, min_size=1, max_size=70)


def _columns(tokens: list[tuple[int, bool, float]]) -> Columns:
    ids, mask, logprobs = zip(*tokens, strict=True)
    columns = np.array(ids, np.int32), np.array(mask, bool), np.array(logprobs, np.float32)
    return Columns(*columns, ((0, len(ids), 3),))


@given(TOKENS)
def test_columns_survive_the_wire(tokens: list[tuple[int, bool, float]]) -> None:
    sent = _columns(tokens)
    wire = encode_columns(sent, trajectory_id="t").SerializeToString()
    received = decode_columns(trajectory_pb2.Trajectory.FromString(wire))
    for column in ("token_ids", "loss_mask", "logprobs"):
        np.testing.assert_array_equal(getattr(received, column), getattr(sent, column))
    assert received.version_spans == sent.version_spans


def test_the_wire_bytes_are_little_endian_and_lsb_first() -> None:
    message = encode_columns(_columns([(1, True, -1.0), (258, False, 0.0)]), trajectory_id="t")
    assert message.token_ids.hex() == "0100000002010000"
    assert message.logprobs.hex() == "000080bf00000000"
    assert message.loss_mask.hex() == "01"


def test_bfloat16_log_probs_are_widened_exactly() -> None:
    message = encode_columns(_columns([(1, True, -1.5)]), trajectory_id="t")
    message.logprob_dtype = trajectory_pb2.LOGPROB_DTYPE_BF16
    message.logprobs = bytes.fromhex("c0bf")
    assert decode_columns(message).logprobs.tolist() == [-1.5]


@pytest.mark.parametrize(
    ("column", "content"),
    [
        ("token_ids", b""),
        ("token_ids", b"\x00\x00\x00"),
        ("token_ids", b"\x00" * 8),
        ("logprobs", b""),
        ("logprobs", b"\x00" * 8),
        ("logprobs", b"\x00" * 3),
        ("loss_mask", b""),
        ("loss_mask", b"\x00\x00"),
    ],
)
def test_columns_that_disagree_are_refused(column: str, content: bytes) -> None:
    message = encode_columns(_columns([(1, True, -1.0)]), trajectory_id="t")
    setattr(message, column, content)
    with pytest.raises(InvalidTrajectoryError) as caught:
        decode_columns(message)
    assert caught.value.metadata == {"reason": "length_mismatch"}


def test_encoding_refuses_unequal_or_empty_columns() -> None:
    columns = _columns([(1, True, -1.0), (2, True, -1.0)])
    short = Columns(columns.token_ids, columns.loss_mask, columns.logprobs[:1], ())
    empty = Columns(columns.token_ids[:0], columns.loss_mask[:0], columns.logprobs[:0], ())
    for broken in (short, empty):
        with pytest.raises(InvalidTrajectoryError):
            encode_columns(broken, trajectory_id="t")


@given(st.lists(st.booleans(), max_size=100))
def test_masks_survive_packing(mask: list[bool]) -> None:
    assert unpack_mask(pack_mask(mask), len(mask)).tolist() == mask
