"""Hostile parts by the thousand, and a process that decodes them under limits.

Parts are random bytes, or good parts that were damaged and whose digests were then made right again, so that the code
behind the digests is reached. `run` starts this file as a process of its own: a crash, a hang, an answer that is not
CorruptPart, or more memory than the bound ends it, and its last words name the seed. Used by the fuzz tests.
"""

import argparse
import faulthandler
import json
import os
import re
import resource
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from astraflow.weights.v1 import part_pb2
from astraflow_weights.codec import (
    Schema,
    apply_delta,
    decode_snapshot,
    encode_delta,
    encode_snapshot,
    kernel,
)
from astraflow_weights.codec.delta import encode_delta_tiles
from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.kernel import Bytes, ClassCodes, Isa, Kernel, Status
from astraflow_weights.codec.parts.format import HEADER, TRAILER_BYTES, pack_table
from astraflow_weights.codec.parts.reader import PartHead, read_head, read_table
from astraflow_weights.codec.parts.writer import PartSetHead, write_parts
from astraflow_weights.codec.shards import Shard, ShardedModel
from astraflow_weights.codec.tensors import Array, Model, specs_of
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.errors import CorruptPart
from support.weight_models import AWKWARD_BF16, gaussian_bf16, make_model, same_model, trained

MAX_MODEL_BYTES = 4 * 2**20
"""What `decode_snapshot` may unfold a part of the corpus to."""
MEMORY_BYTES = 64 * 2**20
"""What decoding may add to the process beyond the model: the declared scratch of a decoder."""
_BATCH, _BATCH_S = 100, 120.0
_INSIDE = re.compile(r"^[A-Z_]+ tile \[")

_captured = partial(subprocess.run, capture_output=True, text=True, check=False)
Paths = Sequence[Isa | None]
ALL_PATHS: Paths = (None, *Isa)


@dataclass(frozen=True, kw_only=True)
class Good:
    """A good part and the schema it was made for; a delta with the model it starts from."""

    data: bytes
    schema: Schema
    base: Mapping[str, Array] | None = None


def sealed(content: bytes) -> bytes:
    """The bytes with a right sha256 at their end."""
    return content + sha256(content)


def resealed(part: bytes) -> bytes:
    """The part with its digest made right again, as an attacker would."""
    return sealed(part[:-TRAILER_BYTES])


def opened_table(part: bytes) -> tuple[PartHead, part_pb2.TileTable] | None:
    """Head and table of a part; None when they are damaged."""
    try:
        head = read_head(part)
        return head, read_table(part, head)
    except CorruptPart:
        return None


def with_table(part: bytes, table: part_pb2.TileTable, *, bodies: bytes | None = None) -> bytes:
    """The part with another table, and perhaps with other bodies; its header says how long they are."""
    head = read_head(part)
    bodies = part[head.table_end : -TRAILER_BYTES] if bodies is None else bodies
    stored, num_bytes = pack_table(table)
    header = bytearray(part[: HEADER.size])
    struct.pack_into("<I", header, 8, len(stored))
    struct.pack_into("<III", header, 52, len(bodies), head.num_tiles, num_bytes)
    return sealed(bytes(header) + stored + bodies)


def good_parts() -> list[Good]:
    """Parts of every kind and codec, each a whole set."""
    draw = np.random.default_rng(1)
    mixed = make_model(1)
    weights: Model = {"w": gaussian_bf16(draw, (3000,))}
    exponents = (weights["w"] >> 7).astype(np.int64) & 0xFF
    small = exponents < np.quantile(exponents, 0.1)
    steps = np.where(small, draw.choice(np.array([1, 0xFFFF, 5, 0x8000], np.uint16), 3000), 0)
    moved: Model = {"w": weights["w"] + steps.astype(np.uint16)}
    floats: Model = {"f": draw.standard_normal(300).astype(np.float32), "c": np.arange(200, dtype=np.uint8)}
    stepped: Model = {"f": floats["f"] + np.float32(0.25), "c": np.bitwise_xor(floats["c"], np.uint8(3))}
    little: Model = {"z": np.zeros((), np.float32), "e": np.zeros((0, 7), np.uint8)}
    awkward, rolled = ({**little, "a": np.roll(AWKWARD_BF16, by)} for by in (0, 1))
    bases = [mixed, weights, floats, awkward]
    targets = [trained(mixed, 2, density=0.05), moved, stepped, rolled]
    deltas = [
        Good(data=encode_delta(base, target, context=context)[0], schema=Schema.of_model(base), base=base)
        for base, target in zip(bases, targets, strict=True)
        for context in (False, True)
    ]
    snapshots = [Good(data=encode_snapshot(model)[0], schema=Schema.of_model(model)) for model in targets]
    return [*deltas, *snapshots, _pieces_of_cells(weights, moved), _many_tensors()]


def _pieces_of_cells(base: Model, target: Model) -> Good:
    """The part of the second of two writers, turned into the only one: tiles that do not fill their cells."""
    start = len(base["w"]) // 2
    before, after = (
        ShardedModel(specs=specs_of(model), shards={"w": Shard(start=start, elements=model["w"][start:])})
        for model in (base, target)
    )
    schema = Schema.of_model(base)
    head = PartSetHead(kind=PartKind.DELTA)
    (part,) = write_parts(encode_delta_tiles(before, after), head=head, schema=schema)
    return Good(data=part, schema=schema, base=base)


def _many_tensors() -> Good:
    """Runs of tensors that did not change, and a table that is stored compressed."""
    draw = np.random.default_rng(7)
    base: Model = {f"experts.{number}": gaussian_bf16(draw, (40,)) for number in range(300)}
    touched = {name: array + np.uint16(1) for name, array in base.items() if draw.random() < 0.25}
    part = encode_delta(base, {**base, **touched})[0]
    head = read_head(part)
    assert head.table_end - HEADER.size < head.table_bytes
    return Good(data=part, schema=Schema.of_model(base), base=base)


# ---------------------------------------------------------------- mutation


def hostile(good: Sequence[Good], draw: np.random.Generator) -> Good:
    """One hostile part with the model it is to be applied to."""
    chosen = good[int(draw.integers(len(good)))]
    if draw.random() < 0.05:
        return replace(chosen, data=draw.bytes(int(draw.integers(0, 400))))
    part = chosen.data
    for _ in range(int(draw.integers(1, 4))):
        part = _MUTATIONS[int(draw.integers(len(_MUTATIONS)))](part, draw)
    return replace(chosen, data=resealed(part) if draw.random() < 0.97 else part)


def _bytes_anywhere(part: bytes, draw: np.random.Generator) -> bytes:
    return _spoiled(part, draw, start=0, end=len(part) - TRAILER_BYTES)


def _bytes_of_the_structure(part: bytes, draw: np.random.Generator) -> bytes:
    """Header and table as they are stored."""
    end = struct.unpack_from("<I", part, 8)[0] if len(part) > HEADER.size else len(part)
    return _spoiled(part, draw, start=8, end=HEADER.size + end)


def _bytes_of_a_body_head(part: bytes, draw: np.random.Generator) -> bytes:
    """The first bytes of a tile's body hold its lengths and parameters."""
    if (opened := opened_table(part)) is None or not opened[1].body_bytes:
        return part
    head, table = opened
    index = int(draw.integers(len(table.body_bytes)))
    start = head.table_end + sum(table.body_bytes[:index])
    return _spoiled(part, draw, start=start, end=start + min(24, table.body_bytes[index]))


_NUMBERS = (0, 1, 2, 3, 4, 5, 63, 255, 2**18, 2**21 - 1, 2**21, 2**32 - 1)


def _column(part: bytes, draw: np.random.Generator) -> bytes:
    """A value of a column of the table set to a number at some bound, left out, or put in once more."""
    if (opened := opened_table(part)) is None:
        return part
    table = opened[1]
    column = getattr(table, str(draw.choice(["skipped_cells", "num_changed", "body_bytes"])))
    values = list(column)
    at = int(draw.integers(len(values) + 1))
    values[at : at + int(draw.integers(2))] = [_NUMBERS[draw.integers(len(_NUMBERS))]] * int(draw.integers(3))
    column[:] = values
    return with_table(part, table)


def _codec_column(part: bytes, draw: np.random.Generator) -> bytes:
    """A codec or an exponent replaced, left out or put in once more."""
    if (opened := opened_table(part)) is None:
        return part
    table = opened[1]
    name = str(draw.choice(["codecs", "first_exponents"]))
    values = bytearray(getattr(table, name))
    at = int(draw.integers(len(values) + 1))
    values[at : at + int(draw.integers(2))] = bytes([int(draw.integers(8))]) * int(draw.integers(3))
    setattr(table, name, bytes(values))
    return with_table(part, table)


def _piece_of_a_cell(part: bytes, draw: np.random.Generator) -> bytes:
    """A tile that says to lie somewhere in its cell."""
    if (opened := opened_table(part)) is None:
        return part
    table = opened[1]
    tile, start, count = (_NUMBERS[draw.integers(len(_NUMBERS))] for _ in range(3))
    table.partial_tiles.add(tile=tile, start=start, num_elements=count)
    return with_table(part, table)


def _resized_body(part: bytes, draw: np.random.Generator) -> bytes:
    """The last body longer or shorter, with the lengths in table and header made right."""
    if (opened := opened_table(part)) is None or not opened[1].body_bytes:
        return part
    head, table = opened
    bodies = part[head.table_end : -TRAILER_BYTES]
    change = int(draw.integers(-20, 4000 if draw.random() < 0.2 else 20))
    if not 0 < table.body_bytes[-1] + change < 2**32 or len(bodies) + change < 0:
        return part
    table.body_bytes[-1] += change
    return with_table(part, table, bodies=bodies + draw.bytes(change) if change > 0 else bodies[:change])


def _spoiled(part: bytes, draw: np.random.Generator, *, start: int, end: int) -> bytes:
    """One to four bytes in a range replaced, or one bit flipped."""
    end = min(end, len(part))
    if start >= end:
        return part
    content = bytearray(part)
    at = int(draw.integers(start, end))
    if draw.random() < 0.4:
        content[at] ^= 1 << int(draw.integers(8))
    else:
        length = min(int(draw.integers(1, 5)), end - at)
        content[at : at + length] = b"\xff" * length if draw.random() < 0.3 else draw.bytes(length)
    return bytes(content)


_MUTATIONS: Sequence[Callable[[bytes, np.random.Generator], bytes]] = (
    _bytes_anywhere,
    _bytes_of_the_structure,
    _bytes_of_a_body_head,
    _bytes_of_a_body_head,
    _bytes_of_a_body_head,
    _column,
    _column,
    _codec_column,
    _piece_of_a_cell,
    _resized_body,
)


# ---------------------------------------------------------------- decoding


def decode(part: Good) -> Mapping[str, Array] | CorruptPart:
    """The model that comes of the part, or why it is refused, which must change nothing."""
    if part.base is None:
        try:
            return decode_snapshot([part.data], schema=part.schema, max_bytes=MAX_MODEL_BYTES)
        except CorruptPart as error:
            return error
    mirror = {name: array.copy() for name, array in part.base.items()}
    try:
        apply_delta(mirror, [part.data])
    except CorruptPart as error:
        assert same_model(mirror, part.base), "a refused delta changed the model"
        return error
    return mirror


def decode_on_all(part: Good, *, paths: Paths) -> str:
    """What becomes of the part: "accepted", "refused", or "refused inside" a tile's body. Every path must do the
    same and make the same model.
    """
    results = []
    for path in paths:
        with kernel.using(path):
            results.append(decode(part))
    first = results[0]
    for other in results[1:]:
        if isinstance(first, CorruptPart) or isinstance(other, CorruptPart):
            assert isinstance(first, CorruptPart), f"one path accepts what another refuses: {other}"
            assert isinstance(other, CorruptPart), f"one path accepts what another refuses: {first}"
        else:
            assert same_model(first, other), "two paths make two models"
    if not isinstance(first, CorruptPart):
        return "accepted"
    return "refused inside" if _INSIDE.search(first.message) else "refused"


@dataclass(frozen=True)
class ExactKernel(Kernel):
    """Hands each plane over in memory of its own, so that a read beyond its end is seen by a sanitizer."""

    def unpack(self, planes: Sequence[Bytes], codes: ClassCodes) -> tuple[kernel.U32, kernel.U16] | Status:
        """As the kernel does."""
        return super().unpack([plane.copy() for plane in planes], codes)


def round_trips(*, paths: Paths) -> int:
    """Deltas of every awkward size and density, there and back on every path; returns how many."""
    done = 0
    for size in (1, 2, 63, 64, 65, 127, 128, 129, 1000, 4097):
        for density in (0.0, 0.01, 0.3, 1.0):
            draw = np.random.default_rng(size)
            base = {"w": draw.integers(0, 2**16, size).astype(np.uint16)}
            moved = draw.integers(0, 2**16, size).astype(np.uint16) * (draw.random(size) < density)
            target = {"w": base["w"] + moved.astype(np.uint16)}
            for path in paths:
                for context in (False, True):
                    with kernel.using(path):
                        mirror = {"w": base["w"].copy()}
                        apply_delta(mirror, encode_delta(base, target, context=context))
                    assert same_model(mirror, target), (size, density, path, context)
                    done += 1
    return done


# ---------------------------------------------------------------- the process


def run(
    *, count: int, seed: int, library: Path | None = None, more: Sequence[str] = (), timeout_s: float = 3600
) -> dict[str, int]:
    """Decode `count` parts in a process of its own; returns what became of them. Raises AssertionError.

    `library` is a kernel built with sanitizers, which take the place of the memory limit.
    """
    command = [sys.executable, __file__, "--count", str(count), "--seed", str(seed), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    if library is not None:
        command += ["--library", str(library)]
        environment |= {
            "LD_PRELOAD": sanitizer_library(),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        }
    done = _captured(command, env=environment, timeout=timeout_s)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def sanitizer_library() -> str:
    """Path of the compiler's libasan, "" where it has none."""
    answer = _captured(["cc", "-print-file-name=libasan.so"]).stdout.strip()
    return str(Path(answer).resolve()) if Path(answer).is_absolute() else ""


def build_with_sanitizers(library: Path) -> None:
    """Compile kernel.c so that every access out of bounds and all undefined behaviour end the process."""
    source = kernel.LIBRARY.with_name("kernel.c")
    flags = ["-O1", "-g", "-std=gnu11", "-shared", "-fPIC", "-fsanitize=address,undefined"]
    command = ["cc", *flags, "-fno-sanitize-recover=all", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)


def _use_library(library: Path) -> None:
    loaded = kernel.load(library)
    assert loaded.kernel is not None, loaded.reason
    kernel._loaded = kernel.Loaded(ExactKernel(loaded.kernel.library), loaded.reason)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES + MAX_MODEL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read_beyond() -> None:
    """What a sanitizer must not let pass: the scan of 200 elements in an array of 100."""
    compiled = kernel.active()
    assert compiled is not None
    values, positions, steps = np.ones(100, np.uint16), np.empty(200, np.uint32), np.empty(200, np.uint16)
    pointers = [array.ctypes.data for array in (values, values, positions, steps)]
    compiled.library.af_scan(*pointers[:2], 200, *pointers[2:])


def main() -> None:
    """Decode parts until the count is reached; prints how many were refused and accepted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--read-beyond", action="store_true")
    arguments = parser.parse_args()
    if arguments.library:
        _use_library(arguments.library)
    if arguments.read_beyond:
        _read_beyond()
    paths = ALL_PATHS if kernel.active() else (None,)
    good = good_parts()
    assert {decode_on_all(part, paths=paths) for part in good} == {"accepted"}
    found: Counter[str] = Counter(round_trips=round_trips(paths=paths))
    if not arguments.library:
        _limit_memory()
    for number in range(arguments.count):
        if number % _BATCH == 0:
            faulthandler.dump_traceback_later(_BATCH_S, exit=True)
        part = hostile(good, np.random.default_rng((arguments.seed, number)))
        try:
            found[decode_on_all(part, paths=paths)] += 1
        except BaseException:
            sys.stderr.write(f"seed ({arguments.seed}, {number}): {part.data.hex()}\n")
            raise
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
