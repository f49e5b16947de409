"""Digests of parts, entries and whole models, by sha256.

Invariant: a model's root depends on nothing but its names, dtypes, shapes and bytes, so equal roots mean
equal models on any machine. Manifest, writer and mirror call it; the digests of single tensors are made in
`tensor_hash`.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from astraflow_weights.codec.tensors import TensorSpec

SHA256_BYTES = 32
TENSOR_DIGEST_BYTES = 16
_ROOT_DOMAIN = b"astraflow.weights.v1/model_root\n"


@dataclass(frozen=True, kw_only=True)
class TensorDigest:
    """A tensor's description and the xxh3-128 of its bytes (16 bytes, canonical order)."""

    spec: TensorSpec
    digest: bytes


def sha256(*data: bytes | memoryview) -> bytes:
    """Of all of it in a row; 32 bytes."""
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.digest()


def model_root(digests: Iterable[TensorDigest]) -> bytes:
    """sha256 over the tensors sorted by name, each as its spec followed by its digest; 32 bytes."""
    root = hashlib.sha256(_ROOT_DOMAIN)
    for entry in sorted(digests, key=lambda entry: entry.spec.name):
        root.update(spec_bytes(entry.spec))
        root.update(entry.digest)
    return root.digest()


def spec_bytes(spec: TensorSpec) -> bytes:
    """A tensor's description as it stands in schemas and is hashed into roots."""
    name, dtype = spec.name.encode(), spec.dtype.encode()
    numbers = (
        len(name).to_bytes(4, "little"),
        len(dtype).to_bytes(4, "little"),
        len(spec.shape).to_bytes(4, "little"),
    )
    axes = b"".join(size.to_bytes(8, "little") for size in spec.shape)
    return numbers[0] + name + numbers[1] + dtype + numbers[2] + axes
