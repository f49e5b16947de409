"""Fetches just what some tiles of a version need, to write them anew.

Invariant: which parts are fetched follows from their tables, read by range; what comes is fetched whole and compared
with its sha256. What comes of it is compared with the tiles' own digests, so a table that lies costs a failure and
never a wrong bit. The mirror calls it when tiles of its file
match nothing that they should be.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from astraflow_weights.codec.parts.reader import open_part, read_cells
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tiles.grid import StoredTile
from astraflow_weights.errors import CorruptPart, Edge, ObjectNotFound
from astraflow_weights.mirror.tile_grid import GridTile, TileGrid
from astraflow_weights.mirror.tile_steps import TileSteps
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.manifest import PartRef
from astraflow_weights.versions.planner import PullPlan, PullStep
from astraflow_weights.versions.pull import unusable

# A tile takes about two bytes of a table.
_TABLE_BYTES = 8 * 2**10


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """Parts that hold the tiles, by step. `size_bytes` counts the tables that were read to know that, too."""

    steps: tuple[PullStep, ...]
    size_bytes: int


def plan_repair(store: ObjectStore, plan: PullPlan, tiles: Sequence[GridTile], *, threads: int) -> RepairPlan:
    """Which parts of a plan from nothing hold these tiles. Raises VerificationFailed, and as the store does."""
    wanted = {tile.index for tile in tiles}
    table_bytes, steps = 0, []
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-tables") as pool:
        for step in plan.steps:
            found = list(pool.map(lambda ref, edge=step.edge: _cells(store, edge, ref), step.parts))
            table_bytes += sum(read for _, read in found)
            chosen = [
                ref for ref, (cells, _) in zip(step.parts, found, strict=True) if not wanted.isdisjoint(cells)
            ]
            steps.append(PullStep(edge=step.edge, parts=tuple(chosen)))
    size_bytes = table_bytes + sum(step.size_bytes for step in steps)
    return RepairPlan(steps=tuple(steps), size_bytes=size_bytes)


def fetch_repair(
    store: ObjectStore, plan: RepairPlan, tiles: Sequence[GridTile], *, grid: TileGrid, threads: int
) -> TileSteps:
    """What the plan does to these tiles, and to no other. Raises VerificationFailed, and as the store does."""
    wanted = {tile.index for tile in tiles}
    steps = []
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-repair") as pool:
        for step in plan.steps:
            fetched = pool.map(
                lambda ref, edge=step.edge: _tiles(store, edge, ref, schema=grid.schema), step.parts
            )
            steps.append((step.edge, [tile for found in fetched for tile in found if tile.cell in wanted]))
    return TileSteps(grid, steps)


def _cells(store: ObjectStore, edge: Edge, ref: PartRef) -> tuple[frozenset[int], int]:
    """The cells a part says to have tiles in, and how many bytes were read to know it."""
    length = min(ref.size_bytes, _TABLE_BYTES)
    try:
        while True:
            head = store.get_range(ref.key, start=0, length=length)
            cells = read_cells(head, size_bytes=ref.size_bytes)
            if cells is not None:
                return cells, length
            if length == ref.size_bytes:
                raise CorruptPart(f"the table of {ref.key!r} does not end within {length} bytes")
            length = min(ref.size_bytes, length * 16)
    except ObjectNotFound as error:
        raise unusable(edge, CorruptPart(f"{ref.key!r} is missing from {store.uri}")) from error
    except CorruptPart as error:
        raise unusable(edge, error) from error


def _tiles(store: ObjectStore, edge: Edge, ref: PartRef, *, schema: Schema) -> tuple[StoredTile, ...]:
    try:
        return open_part(fetch_part(store, ref)).tiles(schema)
    except CorruptPart as error:
        raise unusable(edge, error) from error
