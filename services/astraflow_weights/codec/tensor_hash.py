"""Digests of tensors and files, by xxh3.

Invariant: they are taken over the resulting bytes, whatever path led to them. xxh3 runs at memory speed, so
every tensor of every version is checked in full; it guards against faults, not attackers: sha256 of the
parts does that. Publisher, codec, mirror and checkpoints call it.
"""

from pathlib import Path

import numpy as np
import xxhash

from astraflow_weights.codec.digest import TensorDigest
from astraflow_weights.codec.tensors import Array, Model, flat_unsigned, specs_of

_BLOCK_BYTES = 8 << 20


def tensor_digest(array: Array) -> bytes:
    """xxh3-128 of the elements, little endian, row-major, in canonical byte order; 16 bytes."""
    return xxhash.xxh3_128_digest(flat_unsigned(array).view(np.uint8).data)


def tensor_digests(model: Model) -> tuple[TensorDigest, ...]:
    """Digests of all tensors, sorted by name. Raises ValueError as `specs_of` does."""
    return tuple(TensorDigest(spec=spec, digest=tensor_digest(model[spec.name])) for spec in specs_of(model))


def bytes_digest(data: bytes) -> str:
    """xxh3-128 as hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """xxh3-128 of a file's content as hex; reads block by block. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
