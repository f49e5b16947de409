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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from astraflow_weights.codec import apply_delta, decode_snapshot, encode_delta, encode_snapshot, kernel
from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.kernel import Bytes, ClassCodes, Isa, Kernel, Status
from astraflow_weights.codec.parts.format import HEADER, ROW, TRAILER_BYTES
from astraflow_weights.codec.parts.reader import PartHead, read_head
from astraflow_weights.codec.tensor_hash import tile_digest
from astraflow_weights.codec.tensors import Array, Model
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
    """A good part; a delta with the model it starts from."""

    data: bytes
    base: Mapping[str, Array] | None = None


def sealed(content: bytes) -> bytes:
    """The bytes with a right sha256 at their end."""
    return content + sha256(content)


def resealed(part: bytes) -> bytes:
    """The part with every digest made right again, as an attacker would."""
    head, rows, content = _editable(part)
    body = part[:-TRAILER_BYTES]
    for row in rows:
        assert head is not None
        start = head.rows_end + int(row["body_start"])
        row["body_xxh3"] = tile_digest(body[start : start + int(row["body_bytes"])])
    return sealed(bytes(content[:-TRAILER_BYTES]))


def _editable(part: bytes) -> tuple[PartHead | None, Array, bytearray]:
    """A copy of the part with its rows, which change the copy; no head and no rows when the head is damaged."""
    content = bytearray(part)
    try:
        head = read_head(part)
    except CorruptPart:
        return None, np.empty(0, ROW), content
    count = (head.rows_end - head.table_end) // ROW.itemsize
    return head, np.frombuffer(content, ROW, offset=head.table_end, count=count), content


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
        Good(data=encode_delta(base, target, context=context)[0], base=base)
        for base, target in zip(bases, targets, strict=True)
        for context in (False, True)
    ]
    return [*deltas, *(Good(data=encode_snapshot(target)[0]) for target in targets)]


# ---------------------------------------------------------------- mutation


def hostile(good: Sequence[Good], draw: np.random.Generator) -> Good:
    """One hostile part with the model it is to be applied to."""
    chosen = good[int(draw.integers(len(good)))]
    if draw.random() < 0.05:
        return Good(data=draw.bytes(int(draw.integers(0, 400))), base=chosen.base)
    part = chosen.data
    for _ in range(int(draw.integers(1, 4))):
        part = _MUTATIONS[int(draw.integers(len(_MUTATIONS)))](part, draw)
    return Good(data=resealed(part) if draw.random() < 0.97 else part, base=chosen.base)


def _bytes_anywhere(part: bytes, draw: np.random.Generator) -> bytes:
    return _spoiled(part, draw, start=0, end=len(part) - TRAILER_BYTES)


def _bytes_of_the_structure(part: bytes, draw: np.random.Generator) -> bytes:
    end = struct.unpack_from("<I", part, 8)[0] if len(part) > HEADER.size else len(part)
    return _spoiled(part, draw, start=HEADER.size, end=end)


def _bytes_of_a_body_head(part: bytes, draw: np.random.Generator) -> bytes:
    """The first bytes of a tile's body hold its lengths and parameters."""
    head, rows, _ = _editable(part)
    rows = rows[rows["body_bytes"] > 0]
    if head is None or not len(rows):
        return part
    row = rows[draw.integers(len(rows))]
    start = head.rows_end + int(row["body_start"])
    return _spoiled(part, draw, start=start, end=start + min(24, int(row["body_bytes"])))


def _row_field(part: bytes, draw: np.random.Generator) -> bytes:
    """A field of a row, set to a number at some bound."""
    _, rows, content = _editable(part)
    if not len(rows):
        return part
    field = str(draw.choice(["start", "num_elements", "codec", "params", "num_changed", "body_bytes"]))
    values = [0, 1, 2, 3, 4, 5, 63, 255, 2**21 - 1, 2**21, 2**32 - 1]
    most = int(np.iinfo(rows[field].dtype).max)
    rows[field][draw.integers(len(rows))] = min(most, values[draw.integers(len(values))])
    return bytes(content)


def _resized_body(part: bytes, draw: np.random.Generator) -> bytes:
    """The last body longer or shorter, with the lengths in row and header made right."""
    head, rows, _ = _editable(part)
    if head is None or not len(rows):
        return part
    change = int(draw.integers(-20, 4000 if draw.random() < 0.2 else 20))
    content = part[:-TRAILER_BYTES]
    longer = bytearray(content + draw.bytes(max(0, change)) if change > 0 else content[:change] or content)
    change = len(longer) - len(content)
    if head.body_bytes + change < 0:
        return part
    rows = np.frombuffer(longer, ROW, offset=head.table_end, count=len(rows))
    last_bytes = int(rows["body_bytes"][-1]) + change
    if not 0 <= last_bytes < 2**32:
        return part
    rows["body_bytes"][-1] = last_bytes
    struct.pack_into("<Q", longer, 52, head.body_bytes + change)
    return bytes(longer) + bytes(TRAILER_BYTES)


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
    _row_field,
    _resized_body,
)


# ---------------------------------------------------------------- decoding


def decode(part: Good) -> Mapping[str, Array] | CorruptPart:
    """The model that comes of the part, or why it is refused, which must change nothing."""
    if part.base is None:
        try:
            return decode_snapshot([part.data], max_bytes=MAX_MODEL_BYTES)
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
