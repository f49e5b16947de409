"""Deltas of a mixture of experts, of which a step touches a quarter, with all that is stored beside the changes.

Invariant: what is reported was decoded again and compared; ours counts parts, tables and manifests, peers count the
changes in one file of their form. Untouched experts share memory, so a layer of a large model fits a small machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import save

from astraflow_bench.weights.benchmark import body_bytes
from astraflow_bench.weights.model_pairs import Bits, Model, to_bf16
from astraflow_bench.weights.peer_encodings import PEERS, PeerEncoding
from astraflow_weights.codec import Schema, encode_delta
from astraflow_weights.codec.parts.reader import open_parts
from astraflow_weights.codec.tiles import delta as tile_delta
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.versions.references.digest_table import DigestTable, KeyRef, KeyTable, table_message

Figures = dict[str, Any]
# One layer of a model of 30 G weights with 128 experts.
EXPERTS, TOUCHED = 128, 0.25
MATRIX = 768, 2048
DENSITIES = 1e-6, 1e-5, 1e-4, 1e-3
"""Changed share of a touched expert's weights."""
_PROJECTIONS = "gate_proj", "up_proj", "down_proj"
_STEPS = np.array([1, 0xFFFF, 2, 0xFFFE, 3], np.uint16)
_STEP_SHARES = 0.44, 0.44, 0.05, 0.05, 0.02
# A manifest but its digests, with two parts.
_MANIFEST_BYTES = 700
_VERSIONS = 64
# What a flat buffer of positions and values says of itself.
_FLAT_HEADER_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class ExpertStep:
    """Two versions of a layer's experts."""

    base: Model
    target: Model
    touched: Sequence[str]
    num_changed: int


def expert_step(*, density: float, matrix: tuple[int, int] = MATRIX, seed: int) -> ExpertStep:
    """A step that touches a quarter of the experts, each tensor of which changes in at least one weight."""
    draw = np.random.default_rng(seed)
    shared = {
        name: to_bf16((draw.standard_normal(matrix) * 0.02).astype(np.float32)) for name in _PROJECTIONS
    }
    base = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": bits
        for expert in range(EXPERTS)
        for name, bits in shared.items()
    }
    experts = set(draw.choice(EXPERTS, int(EXPERTS * TOUCHED), replace=False).tolist())
    touched = [name for name in base if int(name.split(".")[5]) in experts]
    moved = {name: _moved(base[name], density, draw) for name in touched}
    return ExpertStep(
        base=base,
        target={**base, **{name: bits for name, (bits, _) in moved.items()}},
        touched=touched,
        num_changed=sum(changed for _, changed in moved.values()),
    )


def _moved(bits: Bits, density: float, draw: np.random.Generator) -> tuple[Bits, int]:
    count = max(1, int(draw.binomial(bits.size, density)))
    positions = draw.choice(bits.size, count, replace=False)
    after = bits.reshape(-1).copy()
    after[positions] += draw.choice(_STEPS, count, p=_STEP_SHARES)
    return after.reshape(bits.shape), count


def expert_bytes(step: ExpertStep, *, density: float, seed: int) -> Figures:
    """Bytes per changed weight, of ours and of peers, with framing and without."""
    schema = Schema.of_model(step.base)
    parts = encode_delta(step.base, step.target)
    _check(parts, step, schema)
    manifest = manifest_bytes(num_tensors=len(step.base), touched=len(step.touched), seed=seed)
    framed = {"rice": sum(map(len, parts)) + manifest}
    bodies: dict[str, float] = {"rice": body_bytes(parts)}
    for peer in PEERS:
        bodies[peer.name], framed[peer.name] = _peer_bytes(peer, step)
    return {
        "experts": EXPERTS,
        "tensors": len(step.base),
        "touched_tensors": len(step.touched),
        "num_elements": sum(bits.size for bits in step.base.values()),
        "num_changed": step.num_changed,
        "density": density,
        "parts_bytes_per_change": sum(map(len, parts)) / step.num_changed,
        "manifest_bytes_per_change": manifest / step.num_changed,
        "bytes_per_change": {name: size / step.num_changed for name, size in framed.items()},
        "body_bytes_per_change": {name: size / step.num_changed for name, size in bodies.items()},
    }


def manifest_bytes(*, num_tensors: int, touched: int, seed: int) -> float:
    """Mean bytes of a manifest over many versions, each of which touches other tensors: the dearest case."""
    draw = np.random.default_rng(seed)
    digests = [draw.bytes(16) for _ in range(num_tensors)]
    key: KeyTable | None = None
    total = 0
    for version in range(_VERSIONS):
        for number in draw.choice(num_tensors, touched, replace=False).tolist():
            digests[number] = draw.bytes(16)
        table = DigestTable.of(digests, key=key)
        total += _MANIFEST_BYTES + len(table_message(table).SerializeToString())
        if table.key is None:
            ref = KeyRef(sequence=version, sha256=bytes(32))
            key = KeyTable(ref=ref, schema_sha256=bytes(32), digests=table.digests)
    return total / _VERSIONS


def _check(parts: Sequence[bytes], step: ExpertStep, schema: Schema) -> None:
    """The delta must lead from the base to the target, tensor by tensor."""
    mirror = {name: step.base[name].reshape(-1).copy() for name in step.touched}
    for tile in open_parts(parts, kind=PartKind.DELTA, schema=schema).tiles:
        elements = mirror[tile.spec.name][tile.start : tile.start + tile.num_elements]
        tile_delta.decode_tile(tile, base=elements).apply_to(elements)
    if not all(np.array_equal(bits, step.target[name].reshape(-1)) for name, bits in mirror.items()):
        raise AssertionError("a delta of experts did not lead to its target bit by bit")


def _peer_bytes(peer: PeerEncoding, step: ExpertStep) -> tuple[int, int]:
    """Bytes without framing and with it; tensors that did not change cost what their encoding costs."""
    streams: dict[str, Bits] = {}
    unchanged: dict[str, list[bytes]] = {}
    size_bytes = 0
    for name, base in step.base.items():
        after = step.target[name]
        if after is base:
            kind = name.rsplit(".", 2)[1]
            if kind not in unchanged:
                unchanged[kind] = peer.encode(base.reshape(-1), base.reshape(-1)) if peer.is_dense else []
            encoded = unchanged[kind]
        else:
            encoded = peer.encode(base.reshape(-1), after.reshape(-1))
            mirror = base.reshape(-1).copy()
            peer.apply(mirror, encoded)
            if not np.array_equal(mirror, after.reshape(-1)):
                raise AssertionError(f"{peer.name} did not lead to its target bit by bit")
        size_bytes += sum(map(len, encoded))
        for number, stream in enumerate(encoded):
            streams[f"{name}.{number}"] = np.frombuffer(stream, np.uint8)
    framed = size_bytes + _FLAT_HEADER_BYTES if peer.is_flat else len(save(streams))
    return size_bytes, framed
