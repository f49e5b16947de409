"""One tile of one tensor, encoded or being decoded: the vocabulary shared by containers and tile codecs.

Invariant: a tile never crosses a line of the tensor's grid, and what it says about itself was bound-checked
when its part was opened. Containers carry tiles without knowing codecs; codecs turn tiles into steps
without knowing containers.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow_weights.tensors import TensorSpec


class PartKind(IntEnum):
    """What a part's tiles mean."""

    SNAPSHOT = 0
    DELTA = 1


class TileCodec(IntEnum):
    """Encodings of a tile. Numbers are part of the format; 2 to 5 are reserved for codecs that do not exist
    yet.
    """

    RAW = 0
    """Elements (snapshot) or wrapped differences (delta), little endian."""
    ZERO = 1
    """All elements zero (snapshot) or nothing changed (delta); no body."""
    GAP_ZSTD = 6
    """Gaps between changed elements and their steps, in compressed byte planes; delta only."""
    RAW_ZSTD = 7
    """As RAW, in compressed byte planes; in a delta the differences are zigzag-mapped first."""


@dataclass(frozen=True, kw_only=True)
class EncodedTile:
    """A tile ready to be put into a part. `start` and `num_elements` are in elements of the flat tensor.

    `params` and `aux` belong to the codec. `num_changed` is 0 in snapshots.
    """

    start: int
    num_elements: int
    codec: TileCodec
    body: bytes = b""
    num_changed: int = 0
    params: tuple[int, int, int] = (0, 0, 0)
    aux: int = 0


@dataclass(frozen=True, kw_only=True)
class StoredTile:
    """A tile inside an opened part; `body` is a view of the part's bytes."""

    spec: TensorSpec
    start: int
    num_elements: int
    codec: TileCodec
    body: memoryview
    num_changed: int
    params: tuple[int, int, int]
    aux: int

    def __str__(self) -> str:
        return (
            f"{self.codec.name} tile [{self.start}, {self.start + self.num_elements}) of {self.spec.name!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Wrapped differences of one tile. `positions` (ascending, inside the tile) is None when `values` has
    one per element.
    """

    values: npt.NDArray[Any]
    positions: npt.NDArray[np.int64] | None = None

    def add_to(self, tile: npt.NDArray[Any]) -> None:
        """Add to the unsigned elements of a tile, in place; sums wrap around."""
        if self.positions is None:
            np.add(tile, self.values, out=tile)
        else:
            tile[self.positions] += self.values
