"""The tiles of a whole model: where each lies, and the digests by which a mirror knows its own.

Invariant: tiles are numbered as the schema numbers its cells, so a table of digests that was written by one
process is read by another. The mirror and its journal call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tensors import MAX_TILE_ELEMENTS, Array, TensorSpec, flat_unsigned, specs_of
from astraflow_weights.mirror.checkpoint import DamagedCheckpoint, map_weights

UInts = npt.NDArray[Any]
# One row of 16 bytes per tile; all zero says nothing about it.
TileDigests = npt.NDArray[np.uint8]
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTile:
    """Cell `index` of the schema, as a tile of the model: elements [start, start + count) of a tensor."""

    index: int
    spec: TensorSpec
    start: int
    count: int

    @property
    def number(self) -> int:
        """Its place among the tiles of its tensor."""
        return self.start // MAX_TILE_ELEMENTS

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.count * self.spec.itemsize

    def __str__(self) -> str:
        return f"tile {self.number} of {self.spec.name!r}"


class TileGrid:
    """All tiles of a model."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        places = (schema.place(cell) for cell in range(schema.num_cells))
        self.tiles = tuple(
            GridTile(index=cell, spec=spec, start=start, count=count)
            for cell, (spec, start, count) in enumerate(places)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self.schema.specs)

    @property
    def max_tile_bytes(self) -> int:
        """Bytes of the largest tile; 0 for a model without elements."""
        return max((tile.size_bytes for tile in self.tiles), default=0)


class MappedTiles:
    """The tiles of a weights file, by memory mapping: what is written to them is in the file."""

    def __init__(self, path: Path, grid: TileGrid) -> None:
        """Raises DamagedCheckpoint when the file is not one of these tensors."""
        self.grid = grid
        self.model: Mapping[str, Array] = map_weights(path, "r+")
        if not self.model or specs_of(self.model) != grid.schema.specs:
            raise DamagedCheckpoint(f"{path} is of another model")
        self._flats = {name: flat_unsigned(array) for name, array in self.model.items()}

    def view(self, tile: GridTile) -> UInts:
        """The elements of a tile as unsigned bit patterns; shares the file's memory."""
        return self._flats[tile.spec.name][tile.start : tile.start + tile.count]

    def elements(self, name: str, start: int, count: int) -> UInts:
        """Any elements of a tensor, in the same way."""
        return self._flats[name][start : start + count]

    def digest(self, tile: GridTile) -> bytes:
        """Of what the tile holds now."""
        return digest_of(self.view(tile))

    def digests(self) -> TileDigests:
        """Of all tiles."""
        table = empty_digests(self.grid)
        for tile in self.grid.tiles:
            table[tile.index] = np.frombuffer(self.digest(tile), np.uint8)
        return table


def digest_of(elements: UInts) -> bytes:
    """xxh3-128 of the elements; 16 bytes."""
    return xxhash.xxh3_128_digest(elements.view(np.uint8).data)


def empty_digests(grid: TileGrid) -> TileDigests:
    """A table that says nothing about any tile."""
    return np.zeros((len(grid.tiles), DIGEST_BYTES), np.uint8)
