"""Changes the tiles of a mirror's weights file in place, so that a kill at any instant can be recovered.

Invariant: each tile goes from its old content to its new content through a slot of the journal; what is written over
had the digest that it must have, and no tile is written twice by the same path. Several threads, one tile each.
The caller holds the exclusive lock. `mirror` calls it.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from astraflow_kit import failpoints
from astraflow_weights.mirror.changes import ChangeRecorder
from astraflow_weights.mirror.journal import Journal, Slot
from astraflow_weights.mirror.tile_grid import GridTile, MappedTiles, TileDigests, UInts, digest_of
from astraflow_weights.mirror.tile_steps import TileSteps


class TileWriter:
    """One change of one mirror, begun in the journal. `old` holds the digests of what is held; `recorder` notes what
    changes.
    """

    def __init__(
        self,
        tiles: MappedTiles,
        *,
        old: TileDigests,
        journal: Journal,
        threads: int,
        recorder: ChangeRecorder | None = None,
    ) -> None:
        self._tiles = tiles
        self._old = old
        self._threads = threads
        self._recorder = recorder
        progress = journal.progress(tiles.grid)
        assert progress is not None
        self._progress = progress
        self._slots: SimpleQueue[Slot] = SimpleQueue()
        self._settle(journal.slots(tiles.grid))

    def advance(self, steps: TileSteps, *, check: bool = False) -> list[GridTile]:
        """Take every tile to the end of the path; those that hold what they should not are left and returned.

        With `check` also tiles that the path does not change are looked at. Raises VerificationFailed.
        """
        changed = steps.changed
        damaged = self._each(changed, lambda tile: self._advance(tile, steps))
        if check:
            indexes = {tile.index for tile in changed}
            rest = [tile for tile in self._tiles.grid.tiles if tile.index not in indexes]
            damaged += [tile for tile in rest if self._tiles.digest(tile) != self._old_digest(tile)]
        return damaged

    def revert(self, steps: TileSteps) -> list[GridTile]:
        """Take every tile back to what was held; those where that cannot be done are returned."""
        return self._each(self._tiles.grid.tiles, lambda tile: self._revert(tile, steps))

    def restore(self, tiles: Iterable[GridTile], fill: Callable[[GridTile, UInts], None]) -> list[GridTile]:
        """Write what was held to these tiles anew, as `fill` gives it; those that it gives wrongly are returned."""
        return self._each(tiles, lambda tile: self._restore(tile, fill))

    def new_digests(self) -> TileDigests:
        """Digests of all tiles after the path."""
        written = np.any(self._progress, axis=1, keepdims=True)
        return np.where(written, self._progress, self._old)

    def _advance(self, tile: GridTile, steps: TileSteps) -> bool:
        current = self._tiles.view(tile)
        found = self._tiles.digest(tile)
        if found == self._progress[tile.index].tobytes():
            if self._recorder is not None:
                self._recorder.require(tile)
            return True
        if found != self._old_digest(tile) and not steps.from_nothing:
            return False
        slot = self._slots.get()
        try:
            content = slot.room(current)
            np.copyto(content, current)
            steps.advance(tile, content)
            if self._recorder is not None:
                self._recorder.note(tile, current, content)
            digest = slot.seal(tile, content)
            self._progress[tile.index] = np.frombuffer(digest, np.uint8)
            self._copy(tile, content)
        finally:
            self._slots.put(slot)
        return True

    def _revert(self, tile: GridTile, steps: TileSteps) -> bool:
        if self._tiles.digest(tile) == self._old_digest(tile):
            return True
        return self._replace(tile, lambda content: steps.revert(tile, content))

    def _restore(self, tile: GridTile, fill: Callable[[GridTile, UInts], None]) -> bool:
        def filled(content: UInts) -> bool:
            content[:] = 0
            fill(tile, content)
            return True

        return self._replace(tile, filled)

    def _replace(self, tile: GridTile, change: Callable[[UInts], bool]) -> bool:
        """Write the old content, which `change` makes of the present one; only if it really is that."""
        slot = self._slots.get()
        try:
            content = slot.room(self._tiles.view(tile))
            np.copyto(content, self._tiles.view(tile))
            if not change(content) or digest_of(content) != self._old_digest(tile):
                return False
            slot.seal(tile, content)
            self._copy(tile, content)
        finally:
            self._slots.put(slot)
        return True

    def _copy(self, tile: GridTile, content: UInts) -> None:
        """The one place that writes over what engines load. A test can make it die half-way."""
        into, half = self._tiles.view(tile), tile.count // 2
        failpoints.hit("weights.mirror.tile")
        np.copyto(into[:half], content[:half])
        failpoints.hit("weights.mirror.tile_torn")
        np.copyto(into[half:], content[half:])

    def _settle(self, slots: Sequence[Slot]) -> None:
        """End the copies that a kill interrupted; only then are the slots free."""
        for slot in slots:
            sealed = slot.sealed()
            if sealed is not None and sealed.tile < len(self._tiles.grid.tiles):
                tile = self._tiles.grid.tiles[sealed.tile]
                into = self._tiles.view(tile)
                if len(sealed.content) == into.nbytes and self._tiles.digest(tile) != sealed.digest:
                    np.copyto(into, sealed.content.view(into.dtype))
            self._slots.put(slot)

    def _each(self, tiles: Iterable[GridTile], work: Callable[[GridTile], bool]) -> list[GridTile]:
        """The tiles for which `work` answers False. The first exception ends it."""
        chosen = list(tiles)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="weights-apply") as pool:
            try:
                done = list(pool.map(work, chosen))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return [tile for tile, good in zip(chosen, done, strict=True) if not good]

    def _old_digest(self, tile: GridTile) -> bytes:
        return bytes(self._old[tile.index])
