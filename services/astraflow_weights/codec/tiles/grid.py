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

from astraflow_weights.codec import kernel
from astraflow_weights.codec.tensors import DTYPE_BY_NAME, TensorSpec


class PartKind(IntEnum):
    """What a part's tiles mean."""

    SNAPSHOT = 0
    DELTA = 1


class TileCodec(IntEnum):
    """Encodings of a tile. Numbers are part of the format (docs/weight-format.md); a tile that did not change (delta)
    or is zero (snapshot) is not written.
    """

    RAW = 0
    """Elements (snapshot) or differences (delta), little endian."""
    RICE = 2
    """Rice-coded gaps between changed elements, and their steps; bfloat16, delta only."""
    RICE_CTX = 3
    """As RICE, inside classes of equal exponent of the base; bfloat16, delta only."""
    EXP_PLANE = 4
    """Compressed plane of exponents beside the plane of signs and mantissas; bfloat16, snapshot only."""
    XOR_ZSTD = 5
    """Compressed byte planes of the elements (snapshot) or of their exclusive or (delta); not for bfloat16."""


@dataclass(frozen=True, kw_only=True)
class EncodedTile:
    """A tile ready to be put into a part. `start` and `num_elements` are in elements of the flat tensor.

    `first_exponent` belongs to RICE_CTX. `num_changed` is 0 in snapshots.
    """

    start: int
    num_elements: int
    codec: TileCodec
    body: bytes
    num_changed: int = 0
    first_exponent: int = 0


@dataclass(frozen=True, kw_only=True)
class StoredTile:
    """A tile inside an opened part; `body` is a view of the part's bytes, `cell` counts over all tensors."""

    spec: TensorSpec
    cell: int
    start: int
    num_elements: int
    codec: TileCodec
    body: memoryview
    num_changed: int
    first_exponent: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Unsigned twin of the tensor's dtype."""
        return DTYPE_BY_NAME[self.spec.dtype].unsigned

    def __str__(self) -> str:
        return (
            f"{self.codec.name} tile [{self.start}, {self.start + self.num_elements}) of {self.spec.name!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Differences of one tile: wrapped for bfloat16, exclusive or for other dtypes.

    `positions` (each once, inside the tile) is None when `values` has one per element.
    """

    values: npt.NDArray[Any]
    positions: npt.NDArray[np.uint32] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that are held."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def apply_to(self, tile: npt.NDArray[Any]) -> None:
        """Go from the base to the target, in place, on the unsigned elements of a tile."""
        if tile.dtype != np.uint16:
            if self.positions is None:
                np.bitwise_xor(tile, self.values, out=tile)
            else:
                tile[self.positions] ^= self.values
        elif self.positions is None:
            np.add(tile, self.values, out=tile)
        elif (compiled := kernel.active()) is not None and tile.flags.c_contiguous:
            compiled.add(tile, self.positions, self.values)
        else:
            tile[self.positions] += self.values

    def revert_from(self, tile: npt.NDArray[Any]) -> None:
        """Go from the target back to the base, in place."""
        values = -self.values if tile.dtype == np.uint16 else self.values
        Steps(values=values, positions=self.positions).apply_to(tile)
