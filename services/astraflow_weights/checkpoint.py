"""Checkpoint folders on disk: one version, loadable by any tool that reads safetensors.

Invariant: a folder appears under its name only when every byte in it is on the disk; what is read back is
bound-checked, and its digests decide whether it is used. The mirror calls it.

    <folder>/model.safetensors  config.json …  astraflow_version.json
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from astraflow_weights.durable import sync_folder, write_chunks_synced, write_synced
from astraflow_weights.layout import VERSION_FILE, WEIGHTS_FILE
from astraflow_weights.tensors import DTYPE_BY_NAME, DTYPES, Array, Model, flat_unsigned, specs_of

SCHEMA_VERSION = 1
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 * 2**20
_ALIGNMENT = 8
_DTYPE_BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES}


class DamagedCheckpoint(Exception):
    """A folder does not hold what its version file says. Stays inside the mirror, which fetches anew."""


class VersionFile(BaseModel):
    """Content of `astraflow_version.json`: which version a folder holds. Digests are hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int
    run_id: str
    policy_id: str
    version: int
    manifest_sha256: str
    model_root: str
    assets: Mapping[str, str]
    """sha256 by file name."""


class _TensorHeader(BaseModel):
    """One tensor in the header of a safetensors file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_checkpoint(
    folder: Path, model: Model, *, assets: Mapping[str, bytes], version_file: VersionFile
) -> None:
    """Fill the new folder `folder` and sync it. Raises FileExistsError, and OSError when the disk is full."""
    folder.mkdir()
    write_chunks_synced(folder / WEIGHTS_FILE, _safetensors(model))
    for name, data in assets.items():
        write_synced(folder / name, data)
    write_synced(folder / VERSION_FILE, version_file.model_dump_json(indent=1).encode())
    sync_folder(folder)


def read_version_file(folder: Path) -> VersionFile:
    """Raises DamagedCheckpoint when it is missing, damaged or of another schema."""
    try:
        content = VersionFile.model_validate_json((folder / VERSION_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise DamagedCheckpoint(f"{folder / VERSION_FILE} cannot be read: {error}") from error
    if content.schema_version != SCHEMA_VERSION:
        raise DamagedCheckpoint(f"{folder} has schema version {content.schema_version}, not {SCHEMA_VERSION}")
    return content


def map_model(folder: Path) -> dict[str, Array]:
    """Read-only views of the tensors in the weights file, by memory mapping. Raises DamagedCheckpoint."""
    path = folder / WEIGHTS_FILE
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
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


def _safetensors(model: Model) -> Iterator[bytes | memoryview]:
    # Widest elements first, as the reference writer does: then every tensor is aligned without gaps.
    specs = sorted(specs_of(model), key=lambda spec: (-DTYPE_BY_NAME[spec.dtype].array.itemsize, spec.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.size_bytes
        code = DTYPE_BY_NAME[spec.dtype].safetensors
        header[spec.name] = {"dtype": code, "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield _LENGTH.pack(len(text)) + text
    for spec in specs:
        yield flat_unsigned(model[spec.name]).view(np.uint8).data


def replace_link(link: Path, target: str) -> None:
    """Point the symbolic link at `target`, atomically and durably."""
    scratch = link.with_name(f".{link.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.replace(link)
    sync_folder(link.parent)
