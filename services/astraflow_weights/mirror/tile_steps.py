"""What a path through the log does to each tile of a model.

Invariant: all parts of a path were opened for the grid's schema, and what they do not hold they do not change, so a
tile can be taken from one version to another alone, through all steps of the path, without looking at any other.
Nothing is kept but views of the parts. The mirror calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow_weights.codec.parts.reader import PartSet
from astraflow_weights.codec.tiles import delta as tile_delta
from astraflow_weights.codec.tiles import snapshot as tile_snapshot
from astraflow_weights.codec.tiles.grid import PartKind, StoredTile, TileCodec
from astraflow_weights.errors import CorruptPart, Edge
from astraflow_weights.mirror.tile_grid import GridTile, TileGrid, UInts
from astraflow_weights.versions.pull import unusable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A stored tile (or, where two ranks met, a part of one) and the path it belongs to."""

    tile: StoredTile
    edge: Edge

    @property
    def is_snapshot(self) -> bool:
        return self.edge.base_version is None


class TileSteps:
    """The pieces of all steps, by tile, in order."""

    def __init__(self, grid: TileGrid, steps: Sequence[tuple[Edge, Sequence[StoredTile]]]) -> None:
        self.edges = tuple(edge for edge, _ in steps)
        self._grid = grid
        self._pieces: list[list[_Piece]] = [[] for _ in grid.tiles]
        for edge, tiles in steps:
            for tile in tiles:
                self._pieces[tile.cell].append(_Piece(tile=tile, edge=edge))

    @property
    def from_nothing(self) -> bool:
        """Whether the first step is a snapshot: what the tiles held before does not matter."""
        return bool(self.edges) and self.edges[0].base_version is None

    @property
    def changed(self) -> list[GridTile]:
        """Tiles that the path writes to."""
        return [tile for tile in self._grid.tiles if self.from_nothing or self._pieces[tile.index]]

    def advance(self, tile: GridTile, elements: UInts) -> None:
        """Take the elements of a tile, in place, to the end of the path. Raises VerificationFailed."""
        if self.from_nothing:
            # What no tile of a snapshot holds is zero.
            elements[:] = 0
        for piece in self._pieces[tile.index]:
            at = piece.tile.start - tile.start
            into = elements[at : at + piece.tile.num_elements]
            try:
                if piece.is_snapshot:
                    tile_snapshot.decode_tile(piece.tile, out=into)
                else:
                    tile_delta.decode_tile(piece.tile, base=into).apply_to(into)
            except CorruptPart as error:
                raise unusable(piece.edge, error, tensor=tile.spec.name, tile=tile.number) from error

    def revert(self, tile: GridTile, elements: UInts) -> bool:
        """Take the elements of a tile, in place, back to where the path begins; False when they do not tell how.

        A snapshot says nothing about what was before it, and RICE_CTX needs just that to be read.
        """
        pieces = self._pieces[tile.index]
        if self.from_nothing or any(piece.tile.codec is TileCodec.RICE_CTX for piece in pieces):
            return False
        for piece in reversed(pieces):
            at = piece.tile.start - tile.start
            into = elements[at : at + piece.tile.num_elements]
            try:
                tile_delta.decode_tile(piece.tile, base=None).revert_from(into)
            except CorruptPart:
                return False
        return True


def steps_of(grid: TileGrid, sets: Sequence[tuple[Edge, PartSet]]) -> TileSteps:
    """The steps of whole sets of parts of the grid's schema."""
    return TileSteps(grid, [(edge, parts.tiles) for edge, parts in sets])


def kind_of(edge: Edge) -> PartKind:
    """Which kind of parts leads along an edge."""
    return PartKind.SNAPSHOT if edge.base_version is None else PartKind.DELTA
