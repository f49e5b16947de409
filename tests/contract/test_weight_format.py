"""The bytes of parts and log entries, as files: made by this release, to be read by every later one.

A vector never changes once the format is released. A new format gets new files beside these, and a reader that
still takes the old ones. docs/weight-format.md tells how to read them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from astraflow_weights.codec import apply_delta, decode_snapshot, encode_delta, encode_snapshot, kernel
from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.kernel import Isa
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tensors import Array
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.versions import manifest as entries
from astraflow_weights.versions.manifest import PartRef, decode_entry, encode_entry
from support import log_records
from support.weight_models import same_model

VECTORS = Path(__file__).parent / "weight_format"

# bfloat16 bits of 1.0 and of both zeros, a NaN with a payload, an infinity, a denormal.
BASE: dict[str, Array] = {
    "layer.weight": np.array([[0x3F80, 0x0000, 0x8000], [0x7FC1, 0x7F80, 0x0001]], dtype=np.uint16),
    "layer.norm": np.array([1.0, -0.0], dtype=np.float32),
    "codes": np.array(255, dtype=np.uint8),
    "empty": np.zeros((2, 0), dtype=np.uint16),
    "still": np.arange(10, dtype=np.uint16),
    "sparse": np.full(600, 0x3C00, dtype=np.uint16),
    "large": np.full(600, 0x3C00, dtype=np.uint16),
}


def target() -> dict[str, Array]:
    """`BASE` after a step: everything moved, nothing moved, few elements moved, wrapping around."""
    after = {name: array.copy() for name, array in BASE.items()}
    after["layer.weight"] += np.array([[1, 0xFFFF, 1], [2, 3, 0xFFFE]], dtype=np.uint16)
    after["layer.norm"][1] = np.float32(0.0)
    after["codes"] += np.uint8(1)
    after["sparse"][[0, 7, 300, 599]] += np.array([1, 0xFFFF, 1, 2], dtype=np.uint16)
    after["large"][::3] += np.arange(200, dtype=np.uint16) + np.uint16(1)
    return after


# Weights of two sizes, of which the small ones move: what RICE_CTX is for.
MIXED: dict[str, Array] = {
    "w": np.where(np.arange(900) ** 2 % 11 < 4, np.uint16(0x3800), np.uint16(0xBF80)).astype(np.uint16)
}


def mixed_target() -> dict[str, Array]:
    """`MIXED` after a step: every other small weight moved up or down by one, a few large ones by more."""
    after = {"w": MIXED["w"].copy()}
    small = np.flatnonzero(MIXED["w"] == 0x3800)[::2]
    after["w"][small] += np.where(small % 3 == 0, 0xFFFF, 1).astype(np.uint16)
    after["w"][np.flatnonzero(MIXED["w"] == 0xBF80)[5::100]] += np.uint16(40)
    return after


# Long enough that its planes are stored as zstandard frames.
COMPRESSIBLE: dict[str, Array] = {
    "w": np.tile(np.array([0x3F80, 0xBF81], dtype=np.uint16), 300),
    "f": np.arange(300, dtype=np.float32),
    "z": np.zeros(70, dtype=np.float32),
}
COMPRESSIBLE_TARGET: dict[str, Array] = {**COMPRESSIBLE, "f": COMPRESSIBLE["f"] + np.float32(0.5)}


def ref(name: str, size_bytes: int) -> PartRef:
    key = f"run-1/solver/parts/{name * 32}.afwd"
    return PartRef(key=key, size_bytes=size_bytes, sha256=bytes.fromhex(name * 32))


TENSORS, NONCE = tensor_digests(BASE), bytes(range(16))
MANIFEST = log_records.manifest(
    4,
    version=2,
    epoch=3,
    writer_nonce=NONCE,
    step=7,
    snapshot=(ref("aa", 1000),),
    deltas=(entries.DeltaRef(base_version=1, parts=(ref("bb", 10), ref("cc", 20))),),
    tensors=TENSORS,
    model_root=model_root(TENSORS),
    assets=(entries.Asset(file_name="config.json", blob=ref("dd", 2)),),
    num_changed=12,
    num_elements=1219,
    learning_rate=1e-6,
    created_time_s=1_767_225_600.5,
)
BEGINNING = {"nonce": NONCE, "previous_epoch": 1, "created_time_s": 1_767_225_599.25}
FENCE = replace(log_records.fence(3, epoch=3), **BEGINNING)


def vector(name: str) -> bytes:
    return bytes.fromhex((VECTORS / name).read_text())


def codecs(part: bytes) -> dict[str, TileCodec]:
    return {tile.spec.name: tile.codec for tile in open_part(part).tiles}


def test_the_delta_vector_is_what_the_encoder_makes_and_leads_to_the_target() -> None:
    assert encode_delta(BASE, target(), base_version=1, target_version=2) == [vector("delta.hex")]
    mirror = {name: array.copy() for name, array in BASE.items()}
    apply_delta(mirror, [vector("delta.hex")])
    assert same_model(mirror, target())
    assert codecs(vector("delta.hex")) == {
        "codes": TileCodec.RAW,
        "large": TileCodec.RICE,
        "layer.norm": TileCodec.RAW,
        "layer.weight": TileCodec.RAW,
        "sparse": TileCodec.RICE,
        "still": TileCodec.ZERO,
    }


@pytest.mark.parametrize("isa", [None, *Isa], ids=str)
def test_the_vector_with_context_is_what_the_encoder_makes_and_leads_to_the_target(isa: Isa | None) -> None:
    with kernel.using(isa):
        assert encode_delta(MIXED, mixed_target(), context=True) == [vector("delta_context.hex")]
        mirror = {"w": MIXED["w"].copy()}
        apply_delta(mirror, [vector("delta_context.hex")])
    assert same_model(mirror, mixed_target())
    assert codecs(vector("delta_context.hex")) == {"w": TileCodec.RICE_CTX}


def test_compressed_vectors_unfold_to_their_models() -> None:
    """Frames depend on the release of zstandard that made them, so these are only read."""
    snapshot, delta = vector("snapshot_zstd.hex"), vector("delta_zstd.hex")
    assert codecs(snapshot) == {"f": TileCodec.XOR_ZSTD, "w": TileCodec.EXP_PLANE, "z": TileCodec.ZERO}
    assert codecs(delta) == {"f": TileCodec.XOR_ZSTD, "w": TileCodec.ZERO, "z": TileCodec.ZERO}
    model = decode_snapshot([snapshot])
    assert same_model(model, COMPRESSIBLE)
    apply_delta(model, [delta])
    assert same_model(model, COMPRESSIBLE_TARGET)


@pytest.mark.parametrize(("name", "entry"), [("manifest.hex", MANIFEST), ("fence.hex", FENCE)])
def test_entry_vectors_are_what_is_written_and_read(name: str, entry: entries.Entry) -> None:
    assert encode_entry(entry).hex() == vector(name).hex()
    assert decode_entry(vector(name)) == entry


def test_the_root_of_the_base_is_known() -> None:
    assert model_root(TENSORS).hex() == (VECTORS / "model_root.hex").read_text().strip()


def write_vectors() -> None:
    """How the files were made; run by hand for a new format only."""
    contents = {
        "delta.hex": encode_delta(BASE, target(), base_version=1, target_version=2)[0],
        "delta_context.hex": encode_delta(MIXED, mixed_target(), context=True)[0],
        "snapshot_zstd.hex": encode_snapshot(COMPRESSIBLE)[0],
        "delta_zstd.hex": encode_delta(COMPRESSIBLE, COMPRESSIBLE_TARGET)[0],
        "manifest.hex": encode_entry(MANIFEST),
        "fence.hex": encode_entry(FENCE),
        "model_root.hex": model_root(TENSORS),
    }
    for name, content in contents.items():
        lines = [content[start : start + 32].hex() for start in range(0, len(content), 32)]
        (VECTORS / name).write_text("\n".join(lines) + "\n")
