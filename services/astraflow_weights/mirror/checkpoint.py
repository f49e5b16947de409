"""The weights file of a checkpoint folder, mapped: loadable by any tool that reads safetensors.

Invariant: what is read back is bound-checked, and digests decide whether it is used; a file that is made here has
its room before it is mapped, so a full disk is an error and not a signal. The mirror calls it.
"""

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from astraflow_weights.codec.tensors import DTYPE_BY_NAME, DTYPES, Array, TensorSpec
from astraflow_weights.store.layout import WEIGHTS_FILE

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 * 2**20
_ALIGNMENT = 8
_DTYPE_BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES}


class DamagedCheckpoint(Exception):
    """A file does not hold what it should. Stays inside the mirror, which repairs or fetches anew."""


class _TensorHeader(BaseModel):
    """One tensor in the header of a safetensors file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def create_weights_file(path: Path, specs: Sequence[TensorSpec]) -> None:
    """Make a weights file for these tensors, all zero. Raises OSError when there is no room for it."""
    header = _header(specs)
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        size_bytes = len(header) + sum(spec.size_bytes for spec in specs)
        os.posix_fallocate(file.fileno(), 0, size_bytes)


def map_model(folder: Path) -> dict[str, Array]:
    """Read-only views of the tensors in a checkpoint's weights file. Raises DamagedCheckpoint."""
    return map_weights(folder / WEIGHTS_FILE)


def map_weights(path: Path, mode: Literal["r", "r+"] = "r") -> dict[str, Array]:
    """Views of the tensors in a weights file, by memory mapping. Raises DamagedCheckpoint."""
    try:
        content = np.memmap(path, dtype=np.uint8, mode=mode)
        header_end = _LENGTH.size + _LENGTH.unpack(content[: _LENGTH.size].tobytes())[0]
        if header_end > min(len(content), _MAX_HEADER_BYTES):
            raise ValueError(f"its header ends at byte {header_end} of {len(content)}")
        header = json.loads(content[_LENGTH.size : header_end].tobytes())
        header.pop("__metadata__", None)
        tensors = {name: _TensorHeader.model_validate(tensor) for name, tensor in header.items()}
        return {name: _view(content[header_end:], tensor) for name, tensor in tensors.items()}
    except (OSError, ValueError, struct.error, AttributeError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error


def _view(data: Array, tensor: _TensorHeader) -> Array:
    start, end = tensor.data_offsets
    dtype = _DTYPE_BY_CODE.get(tensor.dtype)
    if dtype is None or not 0 <= start <= end <= len(data):
        raise ValueError(f"a {tensor.dtype} tensor at bytes {start} to {end} of {len(data)}")
    return data[start:end].view(np.ndarray).view(dtype.array).reshape(tensor.shape)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    # Widest elements first, as the reference writer does: then every tensor is aligned without gaps.
    ordered = sorted(specs, key=lambda spec: (-DTYPE_BY_NAME[spec.dtype].array.itemsize, spec.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in ordered:
        start, end = end, end + spec.size_bytes
        code = DTYPE_BY_NAME[spec.dtype].safetensors
        header[spec.name] = {"dtype": code, "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text
