"""What weight versions cost in bytes and CPU, beside what other systems ship and beside one memcpy.

Invariant: every figure is a ratio within one process: CPU seconds of one thread as multiples of copying the model
once, bytes as multiples of an entropy bound; each encoding is decoded again and compared before it is reported.
`astraflow bench weights` prints it.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from astraflow_bench.weights.entropy import bounds
from astraflow_bench.weights.model_pairs import Model, Versions
from astraflow_bench.weights.peer_encodings import PEERS, PeerEncoding
from astraflow_weights.codec import (
    Schema,
    apply_delta,
    decode_snapshot,
    encode_delta,
    encode_snapshot,
    kernel,
    merge_deltas,
)
from astraflow_weights.codec.kernel import Isa
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tensors import tile_ranges

Figures = dict[str, Any]


class Stopwatch:
    """Least CPU seconds of several tries, as multiples of a memcpy of the model, made in turn with them.

    Both see the same neighbours on a shared machine, so that a busy minute changes the ratio little.
    """

    def __init__(self, model: Model, *, repeats: int) -> None:
        self._model = model
        self._repeats = repeats
        self._copy = {name: np.ones_like(bits) for name, bits in model.items()}
        self.memcpy_s = float("inf")
        """The least of all copies so far."""

    def __call__(self, work: Callable[[], object], *, before: Callable[[], object] = lambda: None) -> float:
        least, least_copy = float("inf"), float("inf")
        for _ in range(self._repeats):
            least_copy = min(least_copy, _cpu_s(self._memcpy))
            before()
            least = min(least, _cpu_s(work))
        self.memcpy_s = min(self.memcpy_s, least_copy)
        return least / least_copy

    def _memcpy(self) -> None:
        for name, bits in self._model.items():
            np.copyto(self._copy[name], bits)


@dataclass
class WeightsReport:
    """Everything measured; `astraflow bench weights --json` prints its fields."""

    kernel: str
    num_elements: int
    memcpy_bytes_per_s: float = 0.0
    deltas: list[Figures] = field(default_factory=list)
    cpu: list[Figures] = field(default_factory=list)
    two_threads: list[Figures] = field(default_factory=list)
    merge: Figures = field(default_factory=dict)
    snapshot: Figures = field(default_factory=dict)
    experts: list[Figures] = field(default_factory=list)


def delta_bytes(versions: Versions) -> Figures:
    """Bytes of the last delta in every encoding, against the entropy bounds. Decodes each and compares."""
    base, target = versions.models[-2], versions.models[-1]
    limits = bounds(base, target)
    parts = {
        "rice": _checked_parts(base, target, context=False),
        "rice_ctx": _checked_parts(base, target, context=True),
    }
    ours = {name: sum(map(len, written)) for name, written in parts.items()}
    bodies = {name: body_bytes(written) for name, written in parts.items()}
    peers = {peer.name: _checked_peer_size(peer, base, target) for peer in PEERS}
    return {
        "source": versions.source,
        "learning_rate": versions.learning_rate,
        "num_elements": limits.num_elements,
        "density": limits.density,
        "one_unit_share": limits.one_unit / limits.num_changed,
        "bound_bytes_per_change": limits.plain_bits / 8 / limits.num_changed,
        "context_bound_bytes_per_change": limits.context_bits / 8 / limits.num_changed,
        "bytes_per_change": {name: size / limits.num_changed for name, size in {**ours, **peers}.items()},
        "framing_share": {name: 1 - bodies[name] / ours[name] for name in ours},
        "body_bytes_per_change": {
            name: size / limits.num_changed for name, size in {**bodies, **peers}.items()
        },
        "rice_over_bound": ours["rice"] / (limits.plain_bits / 8),
        "rice_ctx_over_bound": ours["rice_ctx"] / (limits.plain_bits / 8),
        "rice_ctx_over_context_bound": ours["rice_ctx"] / (limits.context_bits / 8),
        "over_peer": {
            name: {"rice": ours["rice"] / size, "rice_ctx": ours["rice_ctx"] / size}
            for name, size in peers.items()
        },
    }


def delta_cpu(versions: Versions, watch: Stopwatch, *, isa: Isa | None) -> list[Figures]:
    """Memcpys to encode, and to decode and apply, both delta codecs on one instruction set (None: numpy)."""
    base, target = versions.models[-2], versions.models[-1]
    figures = []
    with kernel.using(isa):
        for name, context in (("rice", False), ("rice_ctx", True)):
            parts = encode_delta(base, target, context=context)
            mirror = _copy(base)
            figures.append(
                {
                    "codec": name,
                    "path": "numpy" if isa is None else isa.name.lower(),
                    "learning_rate": versions.learning_rate,
                    "encode": watch(lambda context=context: encode_delta(base, target, context=context)),  # type: ignore[misc]
                    "decode_apply": watch(
                        lambda mirror=mirror, parts=parts: apply_delta(mirror, parts),  # type: ignore[misc]
                        before=lambda mirror=mirror: _restore(mirror, base),  # type: ignore[misc]
                    ),
                }
            )
    return figures


def peer_cpu(versions: Versions, watch: Stopwatch) -> list[Figures]:
    """Memcpys of the encodings that others ship, and of writing the whole model."""
    base, target = versions.models[-2], versions.models[-1]
    figures: list[Figures] = []
    for peer in PEERS:
        encoded = _encode_peer(peer, base, target)
        mirror = _copy(base)
        figures.append(
            {
                "codec": peer.name,
                "path": "peer",
                "learning_rate": versions.learning_rate,
                "encode": watch(lambda peer=peer: _encode_peer(peer, base, target)),  # type: ignore[misc]
                "decode_apply": watch(
                    lambda peer=peer, mirror=mirror, encoded=encoded: _apply_peer(peer, mirror, encoded),  # type: ignore[misc]
                    before=lambda mirror=mirror: _restore(mirror, base),  # type: ignore[misc]
                ),
            }
        )
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        path = Path(folder) / "model.safetensors"
        save = watch(lambda: save_file(dict(target), path))
    figures.append({"codec": "safetensors.save_file", "path": "peer", "learning_rate": 0.0, "encode": save})
    return figures


def verify_cpu(versions: Versions, watch: Stopwatch) -> float:
    """Memcpys to digest every tensor of a version."""
    return watch(lambda: tensor_digests(versions.models[-1]))


def snapshot_figures(versions: Versions, watch: Stopwatch) -> Figures:
    """Bytes of a snapshot against the plain model, and memcpys to write and read it."""
    model = versions.models[-1]
    parts = encode_snapshot(model)
    schema = Schema.of_model(model)
    if not _same(decode_snapshot(parts, schema=schema), model):
        raise AssertionError("a snapshot did not come back bit by bit")
    return {
        "over_safetensors": sum(map(len, parts)) / _size_bytes(model),
        "encode": watch(lambda: encode_snapshot(model)),
        "decode": watch(lambda: decode_snapshot(parts, schema=schema)),
    }


def merge_figures(versions: Versions, watch: Stopwatch) -> Figures:
    """Bytes of the merged delta over all versions against the sum of its members, and memcpys to make it."""
    members = [
        encode_delta(before, after, base_version=number, target_version=number + 1)
        for number, (before, after) in enumerate(zip(versions.models, versions.models[1:], strict=False))
    ]
    schema = Schema.of_model(versions.models[0])
    merged = merge_deltas(members, schema=schema)
    mirror = _copy(versions.models[0])
    apply_delta(mirror, merged)
    if not _same(mirror, versions.models[-1]):
        raise AssertionError("a merged delta did not lead to the last version")
    return {
        "span": len(members),
        "learning_rate": versions.learning_rate,
        "over_sum": sum(map(len, merged)) / sum(len(part) for parts in members for part in parts),
        "merge": watch(lambda: merge_deltas(members, schema=schema)),
        "apply_merged": watch(
            lambda: apply_delta(mirror, merged), before=lambda: _restore(mirror, versions.models[0])
        ),
    }


def two_threads(versions: Versions, *, repeats: int) -> list[Figures]:
    """How many times as fast two threads are as one, by the clock, each with half of the tensors."""
    base, target = versions.models[-2], versions.models[-1]
    halves = [sorted(base)[::2], sorted(base)[1::2]]
    bases = [{name: base[name] for name in half} for half in halves if half]
    targets = [{name: target[name] for name in half} for half in halves if half]
    mirrors = [_copy(half) for half in bases]
    figures: list[Figures] = []
    for codec, context in (("rice", False), ("rice_ctx", True)):

        def encode(half: int, *, context: bool = context) -> list[bytes]:
            return encode_delta(bases[half], targets[half], context=context)

        parts = [encode(half) for half in range(len(bases))]

        def apply(half: int, *, parts: list[list[bytes]] = parts) -> None:
            apply_delta(mirrors[half], parts[half])

        def restore() -> None:
            for mirror, half in zip(mirrors, bases, strict=True):
                _restore(mirror, half)

        speedups = {
            "encode": _speedup(encode, count=len(bases), repeats=repeats, before=lambda: None),
            "decode_apply": _speedup(apply, count=len(bases), repeats=repeats, before=restore),
        }
        figures.append({"codec": codec, **speedups})
    return figures


def _speedup(work: Callable[[int], object], *, count: int, repeats: int, before: Callable[[], None]) -> float:
    """Wall time of the pieces one after the other, over that of all at once."""
    one = two = float("inf")
    with ThreadPoolExecutor(count) as pool:
        for _ in range(repeats):
            before()
            started = time.perf_counter()
            for piece in range(count):
                work(piece)
            one = min(one, time.perf_counter() - started)
            before()
            started = time.perf_counter()
            list(pool.map(work, range(count)))
            two = min(two, time.perf_counter() - started)
    return one / two


def _checked_parts(base: Model, target: Model, *, context: bool) -> list[bytes]:
    parts = encode_delta(base, target, context=context)
    mirror = _copy(base)
    apply_delta(mirror, parts)
    if not _same(mirror, target):
        raise AssertionError("a delta did not lead to its target bit by bit")
    return parts


def body_bytes(parts: Sequence[bytes]) -> int:
    """Bytes of the encoded tiles, without headers, tables and digests."""
    return sum(len(body) for part in parts for body in open_part(part).bodies)


def _checked_peer_size(peer: PeerEncoding, base: Model, target: Model) -> int:
    encoded = _encode_peer(peer, base, target)
    mirror = _copy(base)
    _apply_peer(peer, mirror, encoded)
    if not _same(mirror, target):
        raise AssertionError(f"{peer.name} did not lead to its target bit by bit")
    return sum(len(stream) for streams in encoded for stream in streams)


def _encode_peer(peer: PeerEncoding, base: Model, target: Model) -> list[list[bytes]]:
    return [
        peer.encode(base[name].reshape(-1)[span], target[name].reshape(-1)[span])
        for name, span in _tiles(base)
    ]


def _apply_peer(peer: PeerEncoding, mirror: Model, encoded: Sequence[Sequence[bytes]]) -> None:
    for (name, span), streams in zip(_tiles(mirror), encoded, strict=True):
        peer.apply(mirror[name].reshape(-1)[span], streams)


def _tiles(model: Model) -> list[tuple[str, slice]]:
    return [
        (name, slice(start, start + count))
        for name, bits in model.items()
        for start, count in tile_ranges(bits.size)
    ]


def _cpu_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _copy(model: Model) -> Model:
    return {name: bits.copy() for name, bits in model.items()}


def _restore(mirror: Model, base: Model) -> None:
    for name, bits in base.items():
        np.copyto(mirror[name], bits)


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in right)


def _size_bytes(model: Model) -> int:
    return sum(bits.nbytes for bits in model.values())


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
