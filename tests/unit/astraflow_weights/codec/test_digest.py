"""Roots tell models apart by everything that makes them different, and by nothing else."""

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from astraflow_weights.codec import digest, tensor_hash
from support.weight_models import make_model, trained

MODEL = make_model()
ROOT = digest.model_root(tensor_hash.tensor_digests(MODEL))


def test_the_root_is_the_documented_formula() -> None:
    expected = hashlib.sha256(b"astraflow.weights.v1/model_root\n")
    dtypes = {np.dtype("uint16"): b"bfloat16", np.dtype("float32"): b"float32", np.dtype("uint8"): b"uint8"}
    for name in sorted(MODEL):
        array, dtype = MODEL[name], dtypes[MODEL[name].dtype]
        expected.update(struct.pack("<I", len(name)) + name.encode())
        expected.update(struct.pack("<I", len(dtype)) + dtype)
        expected.update(struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape))
        expected.update(xxhash.xxh3_128(array.tobytes()).digest())
    assert expected.digest() == ROOT


def test_neither_the_order_of_tensors_nor_their_layout_in_memory_matters() -> None:
    fortran = {name: np.array(array, order="F") for name, array in MODEL.items()}
    for same in (dict(reversed(MODEL.items())), fortran):
        assert digest.model_root(tensor_hash.tensor_digests(same)) == ROOT
    assert digest.model_root(tensor_hash.tensor_digests(MODEL)[::-1]) == ROOT


@pytest.mark.parametrize(
    "change",
    [
        {"model.norm": MODEL["model.norm"].view(np.uint8)},
        {"model.embed.weight": MODEL["model.embed.weight"].reshape(64, 24)},
        {"model.extra": np.zeros((0,), np.uint16)},
        trained(MODEL, 1, density=0.001),
    ],
)
def test_any_difference_gives_another_root(change: dict[str, np.ndarray]) -> None:
    assert digest.model_root(tensor_hash.tensor_digests({**MODEL, **change})) != ROOT


def test_names_and_digests_cannot_be_shifted_into_each_other() -> None:
    first, *rest = tensor_hash.tensor_digests(MODEL)
    renamed = replace(first, spec=replace(first.spec, name=first.spec.name + "x"))
    assert digest.model_root((renamed, *rest)) != ROOT


def test_signed_zeros_and_nan_payloads_are_told_apart() -> None:
    bits = [0x0000, 0x8000, 0x7FC0, 0x7FC1]
    assert len({tensor_hash.tensor_digest(np.array([value], dtype=np.uint16)) for value in bits}) == len(bits)
