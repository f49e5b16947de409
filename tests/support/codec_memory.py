"""What the weight codecs take beyond their input and output, measured in a process of its own.

`python -m support.codec_memory PATH DENSITY ELEMENTS` prints one JSON object: bytes of scratch by operation. Scratch
is the growth of the process's peak resident memory during a call, less what the call returned.
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

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
from astraflow_weights.codec.tensors import Array

_BLOCK = 2**22
_TENSORS = 4


def make_models(num_elements: int, *, density: float, seed: int) -> list[dict[str, Array]]:
    """Normal weights, and twice the same with a share moved by a few units; one random block repeated."""
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal(_BLOCK) * 0.02).astype(np.float32)
    before = (values.view(np.uint32) >> 16).astype(np.uint16)
    after = before.copy()
    moved = generator.random(_BLOCK) < density
    after[moved] += generator.integers(1, 4, int(moved.sum()), dtype=np.uint16)
    later = after.copy()
    later[np.roll(moved, 1)] += 1
    size = num_elements // _TENSORS
    names = [f"t{number}" for number in range(_TENSORS)]
    return [{name: np.resize(block, size) for name in names} for block in (before, after, later)]


def scratch(work: Callable[[], object]) -> int:
    """Bytes that `work` takes beyond what it returns."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    held = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = work()
    return status_bytes("VmHWM") - held - _size(result)


def status_bytes(key: str) -> int:
    """A figure of this process's memory now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _size(result: object) -> int:
    if isinstance(result, dict):
        return sum(array.nbytes for array in result.values())
    return sum(map(len, result)) if isinstance(result, list) else 0


def measure(*, density: float, num_elements: int) -> dict[str, int]:
    """Scratch of every operation, with whatever codes deltas now."""
    # Once in small, so that libraries are loaded and thread-local buffers made.
    _operations(*make_models(_TENSORS * 1000, density=density, seed=0), run=lambda work: (work(), 0)[1])
    return _operations(*make_models(num_elements, density=density, seed=1), run=scratch)


def _operations(
    base: dict[str, Array],
    target: dict[str, Array],
    later: dict[str, Array],
    *,
    run: Callable[[Callable[[], object]], int],
) -> dict[str, int]:
    found: dict[str, int] = {}
    schema = Schema.of_model(base)
    for name, context in (("rice", False), ("rice_ctx", True)):
        found[f"{name} encode"] = run(lambda context=context: encode_delta(base, target, context=context))  # type: ignore[misc]
        delta = encode_delta(base, target, context=context, base_version=0, target_version=1)
        following = encode_delta(target, later, context=context, base_version=1, target_version=2)
        deltas = [delta, following]
        found[f"{name} merge"] = run(lambda deltas=deltas: merge_deltas(deltas, schema=schema, base=base))  # type: ignore[misc]
        del deltas, following
        mirror = {tensor: bits.copy() for tensor, bits in base.items()}
        found[f"{name} apply"] = run(lambda mirror=mirror, delta=delta: apply_delta(mirror, delta))  # type: ignore[misc]
        del mirror, delta
    found["snapshot encode"] = run(lambda: encode_snapshot(target))
    parts = encode_snapshot(target)
    found["snapshot decode"] = run(lambda: decode_snapshot(parts, schema=schema))
    return found


def main(path: str, density: str, num_elements: str) -> None:
    """Print what was measured."""
    with kernel.using(None if path == "numpy" else Isa.AVX512):
        sys.stdout.write(json.dumps(measure(density=float(density), num_elements=int(num_elements))))


if __name__ == "__main__":
    main(*sys.argv[1:])
