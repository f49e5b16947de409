"""Tensors as the weight path handles them: named arrays of unsigned bit patterns with a fixed tile grid.

Invariant: the grid depends on a tensor's number of elements only, so parts written by different ranks meet
at the same borders; arithmetic is done on unsigned integers of the element's width, where steps wrap
around, add up and invert. Codec, manifest and mirror call it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from astraflow_weights.errors import ModelMismatch

# bfloat16 travels as uint16 bit patterns: numpy has no such type, and a delta needs none.
Array: TypeAlias = npt.NDArray[Any]
Model: TypeAlias = Mapping[str, Array]

MAX_TILE_ELEMENTS = 2**21
MAX_ELEMENTS = 2**48
MAX_AXES = 16
MAX_NAME_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """One kind of element: its name in manifests, its array type, its unsigned twin and its safetensors
    code.
    """

    name: str
    array: np.dtype[Any]
    unsigned: np.dtype[Any]
    safetensors: str


DTYPES: tuple[Dtype, ...] = (
    Dtype(name="bfloat16", array=np.dtype("<u2"), unsigned=np.dtype("<u2"), safetensors="BF16"),
    Dtype(name="float32", array=np.dtype("<f4"), unsigned=np.dtype("<u4"), safetensors="F32"),
    Dtype(name="uint8", array=np.dtype("u1"), unsigned=np.dtype("u1"), safetensors="U8"),
)
DTYPE_BY_NAME: Mapping[str, Dtype] = {dtype.name: dtype for dtype in DTYPES}
_DTYPE_BY_ARRAY: Mapping[np.dtype[Any], Dtype] = {dtype.array: dtype for dtype in DTYPES}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, dtype name and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BY_NAME[self.dtype].array.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.num_elements * self.itemsize


def check_spec(spec: TensorSpec) -> TensorSpec:
    """Return `spec` when it is within the bounds of the format. Raises ValueError."""
    if spec.dtype not in DTYPE_BY_NAME:
        raise ValueError(
            f"tensor {spec.name!r} has dtype {spec.dtype!r}; known are {', '.join(DTYPE_BY_NAME)}"
        )
    if not 1 <= len(spec.name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"tensor name {spec.name!r} must have 1 to {MAX_NAME_BYTES} bytes")
    # Axes of length 0 hide nothing: an array of shape (0, 2^63) cannot be made either.
    extent = math.prod(axis or 1 for axis in spec.shape[:MAX_AXES])
    if len(spec.shape) > MAX_AXES or extent > MAX_ELEMENTS or min(spec.shape, default=0) < 0:
        raise ValueError(
            f"tensor {spec.name!r} of shape {spec.shape}: at most {MAX_AXES} axes, {MAX_ELEMENTS} elements"
        )
    return spec


def spec_of(name: str, array: Array) -> TensorSpec:
    """Describe an array. Raises ValueError for a dtype that the format does not carry."""
    dtype = _DTYPE_BY_ARRAY.get(array.dtype)
    if dtype is None:
        raise ValueError(
            f"tensor {name!r} has array dtype {array.dtype}; pass uint16 (bfloat16 bits), float32 or uint8"
        )
    return check_spec(TensorSpec(name=name, dtype=dtype.name, shape=array.shape))


def specs_of(model: Model) -> tuple[TensorSpec, ...]:
    """Describe a model, sorted by name. Raises ValueError for an empty model and as `spec_of` does."""
    if not model:
        raise ValueError("the model has no tensors; a weight version needs at least one")
    return tuple(spec_of(name, model[name]) for name in sorted(model))


def require_same_specs(base: Sequence[TensorSpec], target: Sequence[TensorSpec]) -> None:
    """Raises ModelMismatch naming the first difference between the tensors of two models."""
    before, after = {spec.name: spec for spec in base}, {spec.name: spec for spec in target}
    if before != after:
        raise ModelMismatch(_first_difference(before, after))


def _first_difference(before: Mapping[str, TensorSpec], after: Mapping[str, TensorSpec]) -> str:
    remedy = "a delta keeps names, dtypes and shapes; publish this model as a new policy"
    name = min(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if name not in before:
        return f"tensor {name!r} was added; {remedy}"
    if name not in after:
        return f"tensor {name!r} was removed; {remedy}"
    old, new = before[name], after[name]
    return f"tensor {name!r} was {old.dtype}{list(old.shape)} and is {new.dtype}{list(new.shape)}; {remedy}"


def flat_unsigned(array: Array) -> Array:
    """View of a contiguous array as flat unsigned bit patterns; copies only when it is not contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(_DTYPE_BY_ARRAY[array.dtype].unsigned)


def tile_ranges(stop: int, *, start: int = 0) -> Iterator[tuple[int, int]]:
    """(start, length) of the tiles of elements [start, stop) of a tensor, cut at the lines of its grid, in order.

    Nothing for an empty range. A range that begins or ends inside a cell of the grid gets part of a tile there.
    """
    while start < stop:
        end = min(stop, (start // MAX_TILE_ELEMENTS + 1) * MAX_TILE_ELEMENTS)
        yield start, end - start
        start = end
