"""The compiled loops of `kernel.c`, typed.

Invariant: absent (None) rather than broken: a library that is missing, does not load or is of another release
is not used, and `reason` says why. Results are those of the numpy code, so which of both runs shows in time
only. `rice` and `context` ask `active()`; `astraflow doctor` shows `describe()`.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = Path(__file__).with_name("libkernel.so")
NUM_CLASSES = 16
NUM_PLANES = 7
_ABI = 2

U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

# One class of a tile as both sides of `pack` and `unpack` see it: `ClassCode` of kernel.c.
CLASS_CODE = np.dtype(
    [
        ("count", "<u4"),
        ("exceptions", "<u4"),
        ("population", "<u4"),
        ("gap_bits", "u1"),
        ("mode", "u1"),
        ("size_bits", "u1"),
        ("unused", "u1"),
    ]
)
ClassCodes = npt.NDArray[np.void]


class Isa(IntEnum):
    """Instructions that the kernel may use. Numbers are those of kernel.c."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2


class Status(IntEnum):
    """Answers of the kernel. Numbers are those of kernel.c."""

    OK = 0
    CUT_SHORT = -1
    LEFT_OVER = -2
    OUT_OF_RANGE = -3
    NO_ROOM = -4


@dataclass(frozen=True)
class Kernel:
    """The loaded library. Arrays are contiguous; callers check lengths that the library cannot know."""

    library: ctypes.CDLL

    def use(self, isa: Isa) -> Isa:
        """Use at most `isa` from now on, in this process; returns what is used."""
        return Isa(self.library.af_use(int(isa)))

    @property
    def isa(self) -> Isa:
        """What is used."""
        return Isa(self.library.af_isa())

    def scan(self, base: U16, target: U16) -> tuple[U32, U16]:
        """Ascending positions of the changed elements, and their wrapped steps."""
        positions, steps = np.empty(len(base), np.uint32), np.empty(len(base), np.uint16)
        found = self.library.af_scan(_at(base), _at(target), len(base), _at(positions), _at(steps))
        return positions[:found], steps[:found]

    def rank(self, base: U16, target: U16, *, first_exponent: int) -> tuple[U32, U16, U32, U32]:
        """Ranks and steps grouped by class, and per class the number of changes and of elements."""
        size = len(base)
        scratch = np.empty(size, np.uint32), np.empty(size, np.uint16), np.empty(size, np.uint8)
        ranks, steps = np.empty(size, np.uint32), np.empty(size, np.uint16)
        counts, populations = np.empty(NUM_CLASSES, np.uint32), np.empty(NUM_CLASSES, np.uint32)
        found = self.library.af_rank(
            _at(base), _at(target), size, first_exponent, _at(scratch[0]), _at(scratch[1]), _at(scratch[2]),
            _at(ranks), _at(steps), _at(counts), _at(populations),
        )  # fmt: skip
        return ranks[:found], steps[:found], counts, populations

    def locate(
        self, base: U16, *, first_exponent: int, counts: U32, ranks: U32, steps: U16
    ) -> tuple[U32, U16] | None:
        """Positions of ranks grouped by class, with their steps; None when a class has no such rank."""
        positions, ordered = np.empty(len(ranks), np.uint32), np.empty(len(ranks), np.uint16)
        status = self.library.af_locate(
            _at(base),
            len(base),
            first_exponent,
            _at(counts),
            _at(ranks),
            _at(steps),
            _at(positions),
            _at(ordered),
        )
        return (positions, ordered) if status == Status.OK else None

    def pack(
        self, ranks: U32, steps: U16, codes: ClassCodes, *, capacities: Sequence[int]
    ) -> list[Bytes] | None:
        """The seven bit planes; None when they do not fit `capacities`."""
        planes = [np.empty(capacity, np.uint8) for capacity in capacities]
        addresses = (ctypes.c_void_p * NUM_PLANES)(*(plane.ctypes.data for plane in planes))
        lengths = (ctypes.c_size_t * NUM_PLANES)()
        room = (ctypes.c_size_t * NUM_PLANES)(*capacities)
        status = self.library.af_pack(
            _at(ranks), _at(steps), _at(codes), len(codes), addresses, room, lengths
        )
        if status != Status.OK:
            return None
        return [plane[:length] for plane, length in zip(planes, lengths, strict=True)]

    def unpack(self, planes: Sequence[Bytes], codes: ClassCodes) -> tuple[U32, U16] | Status:
        """Ranks and steps grouped by class, or what is wrong with the planes."""
        count = int(codes["count"].sum())
        ranks, steps = np.empty(count, np.uint32), np.empty(count, np.uint16)
        addresses = (ctypes.c_void_p * NUM_PLANES)(*(plane.ctypes.data for plane in planes))
        lengths = (ctypes.c_size_t * NUM_PLANES)(*map(len, planes))
        status = self.library.af_unpack(addresses, lengths, _at(codes), len(codes), _at(ranks), _at(steps))
        return (ranks, steps) if status == Status.OK else Status(status)

    def add(self, tile: U16, positions: U32, steps: U16) -> None:
        """Add steps at positions that are known to lie inside the tile."""
        self.library.af_add(_at(tile), _at(positions), _at(steps), len(positions))

    def choose(self, ranks: U32, steps: U16, codes: ClassCodes) -> None:
        """Set the cheapest parameters of classes whose count and population are given."""
        self.library.af_choose(_at(ranks), _at(steps), _at(codes), len(codes))


def active() -> Kernel | None:
    """The kernel, when there is one and it is not switched off."""
    return _loaded.kernel if _loaded.enabled else None


def describe() -> str:
    """For people: what codes weight deltas in this process, and why."""
    kernel = active()
    return f"compiled kernel ({kernel.isa.name})" if kernel else f"numpy ({_loaded.reason})"


@contextmanager
def using(isa: Isa | None) -> Iterator[None]:
    """Within the context use at most `isa`, or numpy for None. Whole process; for tests and benchmarks."""
    before = _loaded.enabled, _loaded.kernel.isa if _loaded.kernel else None
    _loaded.enabled = isa is not None
    if _loaded.kernel and isa is not None:
        _loaded.kernel.use(isa)
    try:
        yield
    finally:
        _loaded.enabled = before[0]
        if _loaded.kernel and before[1] is not None:
            _loaded.kernel.use(before[1])


@dataclass
class Loaded:
    """What came of loading: the kernel or None, and the reason that `describe` gives."""

    kernel: Kernel | None
    reason: str
    enabled: bool = True


def load(path: Path) -> Loaded:
    """Load a library; never raises."""
    if not path.exists():
        return Loaded(None, f"{path.name} was not built: no C compiler when the package was installed")
    try:
        library = ctypes.CDLL(str(path))
        abi = library.af_abi()
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{path.name} does not load: {error}; install the package again")
    if abi != _ABI:
        return Loaded(None, f"{path.name} is of release {abi}, not {_ABI}; install the package again")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return Loaded(Kernel(library), "switched off")


_P, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = {
    "af_abi": (_INT, []),
    "af_isa": (_INT, []),
    "af_use": (_INT, [_INT]),
    "af_scan": (ctypes.c_int64, [_P, _P, _SIZE, _P, _P]),
    "af_rank": (ctypes.c_int64, [_P, _P, _SIZE, ctypes.c_uint, *[_P] * 7]),
    "af_locate": (_INT, [_P, _SIZE, ctypes.c_uint, *[_P] * 5]),
    "af_pack": (_INT, [_P, _P, _P, _SIZE, _P, _P, _P]),
    "af_unpack": (_INT, [_P, _P, _P, _SIZE, _P, _P]),
    "af_add": (None, [_P, _P, _P, _SIZE]),
    "af_choose": (None, [_P, _P, _P, _SIZE]),
}


def _at(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


_loaded = load(LIBRARY)
