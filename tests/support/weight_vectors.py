"""The test vectors of the weight path's formats: models, what is made of them, and the command that writes them.

    python tests/support/weight_vectors.py

writes every file of tests/contract/weight_format anew: for a new format only. The contract tests check that this
release makes the same bytes; frames of zstandard depend on the release that made them, and are only read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from astraflow_weights.codec import Schema, encode_delta, encode_snapshot
from astraflow_weights.codec.delta import encode_delta_tiles
from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.parts.writer import PartSetHead, write_parts
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tensors import Array, Model
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.versions import manifest as entries
from astraflow_weights.versions.manifest import PartRef, encode_entry
from astraflow_weights.versions.references.digest_table import KeyRef, KeyTable
from support import log_records
from support.source_tree import REPOSITORY
from support.weight_models import split_model

FOLDER = REPOSITORY / "tests" / "contract" / "weight_format"

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


# Three cells of one tensor and a tensor behind it; the cell in the middle does not change.
TILED: dict[str, Array] = {
    "a": np.full(2 * 2**21 + 9, 0x3C00, np.uint16),
    "b": np.full(700, 0x3C00, np.uint16),
}


def tiled_target() -> dict[str, Array]:
    """`TILED` after a step that changes both sides of the lines of its grid, and the other tensor."""
    after = {name: array.copy() for name, array in TILED.items()}
    after["a"][[3, 2**21 - 1, 2 * 2**21, 2 * 2**21 + 8]] += np.array([1, 0xFFFF, 2, 1], np.uint16)
    after["b"][[0, 349, 350, 699]] += np.array([1, 5, 1, 0xFFFF], np.uint16)
    return after


def tiled_parts() -> list[bytes]:
    """The delta of two writers, each of which makes two parts; both have a piece of the tensor `b`."""
    schema = Schema.of_model(TILED)
    head = PartSetHead(kind=PartKind.DELTA, base_version=4, target_version=5)
    held = zip(split_model(TILED, 2), split_model(tiled_target(), 2), strict=True)
    return [
        part
        for writer, (base, after) in enumerate(held)
        for part in write_parts(
            encode_delta_tiles(base, after), head=head, schema=schema, part_bytes=30, writer=writer, writers=2
        )
    ]


# Long enough that its planes are stored as zstandard frames.
COMPRESSIBLE: dict[str, Array] = {
    "w": np.repeat(np.array([0x3F80, 0xBF81, 0x0123], dtype=np.uint16), 200),
    "f": np.repeat(np.arange(10, dtype=np.float32), 30),
    "z": np.zeros(70, dtype=np.float32),
}
COMPRESSIBLE_TARGET: dict[str, Array] = {**COMPRESSIBLE, "f": COMPRESSIBLE["f"] + np.float32(0.5)}

# So many tensors that the table is stored as a zstandard frame; every third changes.
EXPERTS: dict[str, Array] = {
    f"experts.{number:03}": np.full(40, 0x3C00 + number, np.uint16) for number in range(90)
}
EXPERTS_TARGET: dict[str, Array] = {
    name: array + np.uint16(number % 3 == 0) * (np.arange(40) % 13 == 4).astype(np.uint16)
    for number, (name, array) in enumerate(EXPERTS.items())
}


def ref(name: str, size_bytes: int) -> PartRef:
    """A part of a manifest that is only written down."""
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


def following() -> entries.ManifestEntry:
    """The version after `MANIFEST`, by reference to it: two tensors are different."""
    key = KeyTable(
        ref=KeyRef(sequence=4, sha256=bytes.fromhex("ee" * 32)),
        schema_sha256=MANIFEST.schema_sha256,
        digests=MANIFEST.table.digests,
    )
    changed = {**BASE, "still": target()["still"] + np.uint16(1), "codes": target()["codes"]}
    tensors = tensor_digests(changed)
    whole = entries.Manifest(
        run_id="run-1",
        policy_id="solver",
        version=3,
        sequence=5,
        writer_epoch=3,
        writer_nonce=NONCE,
        step=8,
        parent_version=2,
        snapshot=None,
        deltas=(entries.DeltaRef(base_version=2, parts=(ref("bb", 10),)),),
        model_root=model_root(tensors),
        num_changed=11,
        num_elements=1219,
        tensors=tensors,
    )
    return whole.entry(key)


BEGINNING = {"nonce": NONCE, "previous_epoch": 1, "created_time_s": 1_767_225_599.25}
FENCE = replace(log_records.fence(3, epoch=3), **BEGINNING)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A set of parts: its files, how they are made, and the models between which it leads."""

    files: Sequence[str]
    make: Callable[[], Sequence[bytes]]
    base: Model | None
    target: Model
    holds_frames: bool = False

    @property
    def schema(self) -> Schema:
        """Of its models."""
        return Schema.of_model(self.target)


VECTORS: Mapping[str, Vector] = {
    "delta": Vector(
        files=["delta.hex"],
        make=lambda: encode_delta(BASE, target(), base_version=1, target_version=2),
        base=BASE,
        target=target(),
    ),
    "delta_context": Vector(
        files=["delta_context.hex"],
        make=lambda: encode_delta(MIXED, mixed_target(), context=True),
        base=MIXED,
        target=mixed_target(),
    ),
    "delta_tiled": Vector(
        files=[f"delta_tiled_{number}.hex" for number in range(4)],
        make=tiled_parts,
        base=TILED,
        target=tiled_target(),
    ),
    "delta_experts": Vector(
        files=["delta_experts.hex"],
        make=lambda: encode_delta(EXPERTS, EXPERTS_TARGET),
        base=EXPERTS,
        target=EXPERTS_TARGET,
        holds_frames=True,
    ),
    "delta_zstd": Vector(
        files=["delta_zstd.hex"],
        make=lambda: encode_delta(COMPRESSIBLE, COMPRESSIBLE_TARGET),
        base=COMPRESSIBLE,
        target=COMPRESSIBLE_TARGET,
        holds_frames=True,
    ),
    "snapshot_zstd": Vector(
        files=["snapshot_zstd.hex"],
        make=lambda: encode_snapshot(COMPRESSIBLE),
        base=None,
        target=COMPRESSIBLE,
        holds_frames=True,
    ),
}
SINGLE: Mapping[str, Callable[[], bytes]] = {
    "schema.hex": lambda: Schema.of_model(BASE).content,
    "manifest.hex": lambda: encode_entry(MANIFEST),
    "manifest_by_key.hex": lambda: encode_entry(following()),
    "fence.hex": lambda: encode_entry(FENCE),
    "model_root.hex": lambda: model_root(TENSORS),
}


def stored(name: str) -> bytes:
    """What a file of the vectors holds."""
    return bytes.fromhex((FOLDER / name).read_text())


def contents() -> dict[str, object]:
    """What every set of parts leads from and to, as `contents.json` has it."""
    return {
        name: {
            "parts": list(vector.files),
            "schema": vector.schema.digest.hex(),
            "base": None if vector.base is None else _described(vector.base),
            "target": _described(vector.target),
        }
        for name, vector in VECTORS.items()
    }


def _described(model: Model) -> dict[str, object]:
    """Each tensor: dtype, shape, and its bit patterns as runs of [count, value]."""
    return {
        spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "runs": _runs(model[spec.name])}
        for spec in Schema.of_model(model).specs
    }


def _runs(array: Array) -> list[list[int]]:
    bits = array.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])
    ends = [*(np.flatnonzero(bits[1:] != bits[:-1]) + 1).tolist(), len(bits)]
    starts = [0, *ends[:-1]] if len(bits) else []
    return [[end - start, int(bits[start])] for start, end in zip(starts, ends, strict=False)]


def main() -> None:
    """Write every file."""
    files = {name: make() for name, make in SINGLE.items()}
    for vector in VECTORS.values():
        files |= zip(vector.files, vector.make(), strict=True)
    for name, content in files.items():
        lines = [content[start : start + 32].hex() for start in range(0, len(content), 32)]
        (FOLDER / name).write_text("\n".join(lines) + "\n")
    Path(FOLDER / "contents.json").write_text(json.dumps(contents(), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
