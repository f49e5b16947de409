"""Which elements differ between what a mirror held and what it holds now, for whoever would load only those.

Invariant: a record names every element that differs, or there is none: tiles that were not seen changing (a kill came
between) and too many changes leave nothing. Several threads note tiles; `tile_writer` calls, the mirror hands on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np

from astraflow_weights.codec.kernel import U32
from astraflow_weights.codec.tiles.delta import BF16, scan
from astraflow_weights.mirror.tile_grid import GridTile, TileGrid, UInts

_MAX_SHARE = 1 / 16
"""Of all elements: beyond it whole tensors are no more to load, for a position takes twice the room of a bf16 value."""
_MAX_ELEMENTS = 2**32


@dataclass(frozen=True, kw_only=True)
class ChangedElements:
    """What leads from one version to another: ascending positions in the flat tensor, by name; unchanged ones are left
    out.
    """

    base_version: int
    version: int
    positions: Mapping[str, U32]


class ChangeRecorder:
    """Of one change of one mirror."""

    def __init__(self, grid: TileGrid) -> None:
        self._grid = grid
        self._lock = Lock()
        self._by_tile: dict[int, U32] = {}
        self._room = int(sum(spec.num_elements for spec in grid.schema.specs) * _MAX_SHARE)
        self._is_whole = all(spec.num_elements < _MAX_ELEMENTS for spec in grid.schema.specs)

    def note(self, tile: GridTile, before: UInts, after: UInts) -> None:
        """A tile goes from one content to the other. Any thread."""
        if not self._is_whole:
            return
        if before.dtype == BF16:
            found, _ = scan(before, after)
        else:
            found = np.flatnonzero(before != after).astype(np.uint32)
        with self._lock:
            self._room -= len(found)
            self._by_tile[tile.index] = found + np.uint32(tile.start)
            if self._room < 0:
                self.give_up()

    def require(self, tile: GridTile) -> None:
        """A tile was found changed: without its note the record is not whole."""
        if tile.index not in self._by_tile:
            self.give_up()

    def give_up(self) -> None:
        """Record nothing."""
        self._is_whole = False
        self._by_tile.clear()

    def changes(self, *, base_version: int, version: int) -> ChangedElements | None:
        """All that was noted; None when it is not all that changed."""
        if not self._is_whole:
            return None
        by_name: dict[str, list[U32]] = {}
        for tile in self._grid.tiles:
            if len(self._by_tile.get(tile.index, ())):
                by_name.setdefault(tile.spec.name, []).append(self._by_tile[tile.index])
        positions = {name: np.concatenate(parts) for name, parts in by_name.items()}
        return ChangedElements(base_version=base_version, version=version, positions=positions)
