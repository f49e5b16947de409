"""Byte streams inside a tile body: planes of integers, each compressed on its own.

Invariant: a reader knows every stream's length before it decompresses, so hostile bytes cannot make it
allocate more than that. Splitting integers into planes puts the rare high bytes together, where they cost
almost nothing. The tile codecs call it.

    body = u32 stored length of each stream | streams
    a stream whose stored length equals its real length is stored as it is; a shorter one is a zstandard frame
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from astraflow_weights.errors import CorruptPart

_LENGTH = np.dtype("<u4")
_LEVEL = 1  # higher levels gain nothing on sparse streams and cost 2 to 10 times the time
_MAX_WINDOW_BYTES = 2**27

Bytes = npt.NDArray[np.uint8]


class _Codecs(threading.local):
    """zstandard objects are not thread-safe and not cheap to make."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=False, write_content_size=True
        )
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_codecs = _Codecs()


def split_planes(values: npt.NDArray[Any]) -> list[Bytes]:
    """Bytes of little-endian integers by significance, lowest plane first."""
    width = values.dtype.itemsize
    table = values.view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(table[:, plane]) for plane in range(width)]


def join_planes(planes: Sequence[Bytes], *, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Inverse of `split_planes`; a fresh array."""
    values = np.empty(len(planes[0]), dtype=dtype)
    table = values.view(np.uint8).reshape(-1, dtype.itemsize)
    for index, plane in enumerate(planes):
        table[:, index] = plane
    return values


def pack(streams: Sequence[Bytes]) -> bytes:
    """Compress the streams into one body."""
    stored = [_shorter(stream) for stream in streams]
    lengths = np.array([len(stream) for stream in stored], dtype=_LENGTH)
    return b"".join((lengths.tobytes(), *stored))


def unpack(body: memoryview, *, lengths: Sequence[int]) -> list[Bytes]:
    """Streams of a body whose real lengths are known. Raises CorruptPart unless every byte fits exactly."""
    head = len(lengths) * _LENGTH.itemsize
    if len(body) < head:
        raise CorruptPart(
            f"tile body of {len(body)} bytes is shorter than its {head} bytes of stream lengths"
        )
    stored = [int(length) for length in np.frombuffer(body[:head], dtype=_LENGTH)]
    if head + sum(stored) != len(body):
        raise CorruptPart(f"streams of {stored} bytes do not fill a tile body of {len(body) - head} bytes")
    ends = np.cumsum([head, *stored]).tolist()
    return [_restored(body[ends[i] : ends[i + 1]], length=length) for i, length in enumerate(lengths)]


def _shorter(stream: Bytes) -> bytes:
    raw = stream.tobytes()
    frame = _codecs.compressor.compress(raw)
    return frame if len(frame) < len(raw) else raw


def _restored(stored: memoryview, *, length: int) -> Bytes:
    if len(stored) == length:
        return np.frombuffer(stored, dtype=np.uint8)
    if len(stored) > length:
        raise CorruptPart(f"a stream of {len(stored)} stored bytes is longer than its {length} bytes")
    try:
        declared = zstandard.get_frame_parameters(stored).content_size
        if declared != length:
            raise CorruptPart(f"a stream declares {declared} bytes where the tile needs {length}")
        raw = _codecs.decompressor.decompress(stored, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptPart(f"a stream of {len(stored)} bytes is not a zstandard frame: {error}") from error
    if len(raw) != length:
        raise CorruptPart(f"a stream holds {len(raw)} bytes where the tile needs {length}")
    return np.frombuffer(raw, dtype=np.uint8)
