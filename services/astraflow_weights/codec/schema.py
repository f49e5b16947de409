"""What the tensors of a policy are called and shaped: said once, and referred to by its digest.

Invariant: a schema depends on names, dtypes and shapes only, and equal schemas have equal bytes, which hash to their
digest. It numbers the cells of all tile grids through: tensor by tensor, in order of their names' bytes. Parts name
their tiles by cell, manifests their digests by tensor. Codec, manifest and mirror call it.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from astraflow_weights.codec.digest import sha256, spec_bytes
from astraflow_weights.codec.tensors import (
    DTYPE_BY_NAME,
    MAX_AXES,
    MAX_NAME_BYTES,
    MAX_TILE_ELEMENTS,
    Model,
    TensorSpec,
    check_spec,
    specs_of,
)

_DOMAIN = b"astraflow.weights.v1/schema\n"
_MAX_DTYPE_BYTES = max(len(name) for name in DTYPE_BY_NAME)
_WORD, _AXIS = 4, 8
MAX_CELLS = 2**32


@dataclass(frozen=True)
class Schema:
    """Tensors sorted by name. Make it with `of` or `decode`, which check it."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> "Schema":
        """Of tensors in any order. Raises ValueError when there is none, a name repeats or there are too many cells."""
        schema = cls(tuple(sorted(specs, key=lambda spec: spec.name)))
        if len(schema.numbers) != len(schema.specs) or not schema.specs or schema.num_cells > MAX_CELLS:
            raise ValueError(
                f"a schema of {len(schema.specs)} tensors and {schema.num_cells} cells: at least one tensor, "
                f"no name twice, at most {MAX_CELLS} cells of {MAX_TILE_ELEMENTS} elements"
            )
        return schema

    @classmethod
    def of_model(cls, model: Model) -> "Schema":
        """Of arrays. Raises ValueError as `specs_of` does."""
        return cls.of(specs_of(model))

    @classmethod
    def decode(cls, data: bytes) -> "Schema":
        """The inverse of `content`. Raises ValueError for bytes that no schema has."""
        schema = cls.of(_Reader(data).specs())
        if schema.content != data:
            raise ValueError(f"{len(data)} bytes are not the one spelling of their schema")
        return schema

    @cached_property
    def content(self) -> bytes:
        """Its bytes, as they lie in the store: docs/weight-format.md."""
        return _DOMAIN + b"".join(map(spec_bytes, self.specs))

    @cached_property
    def digest(self) -> bytes:
        """sha256 of `content`; 32 bytes. Parts carry the first 16."""
        return sha256(self.content)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor by name."""
        return {spec.name: number for number, spec in enumerate(self.specs)}

    @cached_property
    def _first_cells(self) -> list[int]:
        """First cell of each tensor, and the number of all cells."""
        counts = (-(-spec.num_elements // MAX_TILE_ELEMENTS) for spec in self.specs)
        return list(accumulate(counts, initial=0))

    @property
    def num_cells(self) -> int:
        """Cells of all tensors; one without elements has none."""
        return self._first_cells[-1]

    def cell(self, name: str, start: int) -> int:
        """The cell in which element `start` of a tensor lies."""
        return self._first_cells[self.numbers[name]] + start // MAX_TILE_ELEMENTS

    def place(self, cell: int) -> tuple[TensorSpec, int, int]:
        """Tensor of a cell below `num_cells`, its first element in it, and its elements."""
        number = bisect_right(self._first_cells, cell) - 1
        spec = self.specs[number]
        start = (cell - self._first_cells[number]) * MAX_TILE_ELEMENTS
        return spec, start, min(MAX_TILE_ELEMENTS, spec.num_elements - start)


class _Reader:
    """Reads specs from hostile bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def specs(self) -> list[TensorSpec]:
        if self._take(len(_DOMAIN)) != _DOMAIN:
            raise ValueError(f"not a schema: begins with {self._data[:16].hex()}")
        specs = []
        while self._at < len(self._data):
            name = self._take(self._number(most=MAX_NAME_BYTES)).decode()
            dtype = self._take(self._number(most=_MAX_DTYPE_BYTES)).decode()
            axes = self._take(self._number(most=MAX_AXES) * _AXIS)
            shape = tuple(
                int.from_bytes(axes[at : at + _AXIS], "little") for at in range(0, len(axes), _AXIS)
            )
            specs.append(check_spec(TensorSpec(name=name, dtype=dtype, shape=shape)))
        return specs

    def _number(self, *, most: int) -> int:
        number = int.from_bytes(self._take(_WORD), "little")
        if number > most:
            raise ValueError(f"a length of {number} before byte {self._at} of a schema; the limit is {most}")
        return number

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise ValueError(f"a schema of {len(self._data)} bytes ends inside a tensor")
        self._at += size
        return taken
