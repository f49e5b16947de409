"""Digests of tensors and tiles, by xxh3.

Invariant: they are taken over the resulting bytes, whatever path led to them. xxh3 runs at memory speed, so
every tensor of every version is checked in full; it guards against faults, not attackers: sha256 of the
parts does that. Publisher, codec and mirror call it.
"""

import numpy as np
import xxhash

from astraflow_weights.codec.digest import TensorDigest
from astraflow_weights.codec.tensors import Array, Model, flat_unsigned, specs_of


def tensor_digest(array: Array) -> bytes:
    """xxh3-128 of the elements, little endian, row-major, in canonical byte order; 16 bytes."""
    return xxhash.xxh3_128_digest(flat_unsigned(array).view(np.uint8).data)


def tensor_digests(model: Model) -> tuple[TensorDigest, ...]:
    """Digests of all tensors, sorted by name. Raises ValueError as `specs_of` does."""
    return tuple(TensorDigest(spec=spec, digest=tensor_digest(model[spec.name])) for spec in specs_of(model))


def tile_digest(body: bytes | memoryview) -> int:
    """xxh3-64 of a tile's encoded body."""
    return xxhash.xxh3_64_intdigest(body)
