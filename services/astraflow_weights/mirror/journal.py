"""What a mirror needs to finish a change of its weights file, whoever dies in between.

Invariant: a tile is written over only when its whole new content stands in a slot beside its digest; a slot is used
again only when that copy is complete. So every tile is old, new, or torn with its new content in a slot, and all parts
that the change is made from lie here, complete. `mirror` and `tile_writer` call it; all of it is one folder.

    <sha256>.part, <sha256>.asset   fetched objects, under this name only when complete
    progress                        16 bytes per tile: digest of its new content, once that is in a slot
    slots                           per thread: a page of head (tile, digest) and one tile
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.parts.reader import Part, open_part
from astraflow_weights.durable import DRAFT_SUFFIX, replace_synced
from astraflow_weights.mirror.tile_grid import DIGEST_BYTES, GridTile, TileDigests, TileGrid, UInts, digest_of
from astraflow_weights.versions.manifest import PartRef

_PAGE = 4096
_HEAD = struct.Struct("<QQ16s")


class Journal:
    """The folder. Objects in it are named by content, so those of another plan do no harm."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[bytes, Part] = {}

    def store(self, ref: PartRef, data: bytes, *, kind: str = "part") -> None:
        """Put a fetched object here, synced. Raises OSError when there is no room."""
        replace_synced(self._path(ref, kind), data)

    def part(self, ref: PartRef) -> Part | None:
        """The opened part; None when it is not here, or not whole. Raises CorruptPart."""
        part = self._opened.get(ref.sha256)
        if part is None:
            content = self._content(ref)
            if content is None:
                return None
            part = self._opened[ref.sha256] = open_part(content)
        return part

    def asset(self, ref: PartRef) -> bytes | None:
        """The content of an asset; None when it is not here."""
        path = self._path(ref, "asset")
        content = path.read_bytes() if path.is_file() else None
        return content if content is not None and sha256(content) == ref.sha256 else None

    def keep_only(self, refs: Iterable[PartRef]) -> None:
        """Remove the objects of other plans, and drafts."""
        kept = {ref.sha256.hex() for ref in refs}
        self._opened = {digest: part for digest, part in self._opened.items() if digest.hex() in kept}
        for path in self._folder.iterdir():
            if path.suffix in (".part", ".asset", DRAFT_SUFFIX) and path.stem not in kept:
                path.unlink(missing_ok=True)

    def begin(self, grid: TileGrid, *, threads: int) -> None:
        """Make room for a change of this model, and forget an earlier one. Raises OSError."""
        self._create("progress", max(1, len(grid.tiles)) * DIGEST_BYTES)
        self._create("slots", threads * (_PAGE + _aligned(grid.max_tile_bytes)))

    def progress(self, grid: TileGrid) -> TileDigests | None:
        """The table of new digests, writable; None when no change of this model was begun."""
        path = self._folder / "progress"
        if not path.is_file() or path.stat().st_size != max(1, len(grid.tiles)) * DIGEST_BYTES:
            return None
        table = np.memmap(path, np.uint8, mode="r+")
        return table.view(np.ndarray).reshape(-1, DIGEST_BYTES)[: len(grid.tiles)]

    def slots(self, grid: TileGrid) -> list["Slot"]:
        """The slots of the change that was begun."""
        stride = _PAGE + _aligned(grid.max_tile_bytes)
        content = np.memmap(self._folder / "slots", np.uint8, mode="r+").view(np.ndarray)
        return [
            Slot(content[start : start + stride]) for start in range(0, len(content) - stride + 1, stride)
        ]

    def clear(self) -> None:
        """Remove everything."""
        self._opened = {}
        for path in self._folder.iterdir():
            path.unlink()

    def _content(self, ref: PartRef) -> memoryview | None:
        path = self._path(ref, "part")
        if not path.is_file() or path.stat().st_size != ref.size_bytes or not ref.size_bytes:
            return None
        content = np.memmap(path, np.uint8, mode="r").view(np.ndarray).data
        return content if sha256(content) == ref.sha256 else None

    def _create(self, name: str, size_bytes: int) -> None:
        path = self._folder / name
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)

    def _path(self, ref: PartRef, kind: str) -> Path:
        return self._folder / f"{ref.sha256.hex()}.{kind}"


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """What a slot says to hold: new content of a tile."""

    tile: int
    content: npt.NDArray[np.uint8]
    digest: bytes


class Slot:
    """Room for the new content of one tile. Used by one thread at a time."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._head = memory[: _HEAD.size]
        self._body = memory[_PAGE:]

    def room(self, like: UInts) -> UInts:
        """Elements to be filled, as many as `like` has; what was here before counts no more."""
        self._head[:] = 0
        return self._body[: like.nbytes].view(like.dtype)

    def seal(self, tile: GridTile, content: UInts) -> bytes:
        """Say that the content, which fills the room, is that of the tile; returns its digest."""
        digest = digest_of(content)
        head = _HEAD.pack(tile.index + 1, content.nbytes, digest)
        self._head[:] = np.frombuffer(head, np.uint8)
        return digest

    def sealed(self) -> Sealed | None:
        """What is here, when it is whole."""
        number, size_bytes, digest = _HEAD.unpack(self._head.tobytes())
        content = self._body[:size_bytes]
        if not number or len(content) != size_bytes or digest_of(content) != digest:
            return None
        return Sealed(tile=number - 1, content=content, digest=digest)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
