"""Fetches what a plan needs, several objects at a time, and opens it as it arrives.

Invariant: what is returned was compared with its sha256, opened, and stands in the journal; an object that lies there
already is not fetched again. Only the parts of a first snapshot go past the journal: they are decoded where they
belong and dropped. `mirror` calls it; `rates` learns from it how fast the store is.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock

from astraflow_weights.codec.parts.reader import Part, PartSet, joined, open_part
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tiles import snapshot as tile_snapshot
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.errors import CorruptPart, Edge, VerificationFailed
from astraflow_weights.mirror.journal import Journal
from astraflow_weights.mirror.tile_grid import MappedTiles
from astraflow_weights.mirror.tile_steps import kind_of
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.manifest import Asset, Manifest, PartRef
from astraflow_weights.versions.planner import PullStep
from astraflow_weights.versions.pull import PullCounts, unusable
from astraflow_weights.versions.rates import MeasuredRates, stopwatch


@dataclass
class Received:
    """What was fetched, by edge; None stands for assets. Thread-safe."""

    sizes: dict[Edge | None, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def add(self, edge: Edge | None, size_bytes: int) -> None:
        """Count an object."""
        with self._lock:
            self.sizes[edge] = self.sizes.get(edge, 0) + size_bytes

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.sizes.values())

    @property
    def counts(self) -> PullCounts:
        """In the terms of a pull."""
        snapshots = [size for edge, size in self.sizes.items() if edge and edge.base_version is None]
        deltas = [size for edge, size in self.sizes.items() if edge and edge.base_version is not None]
        return PullCounts(
            snapshots_fetched=len(snapshots),
            snapshot_bytes=sum(snapshots),
            deltas_fetched=len(deltas),
            delta_bytes=sum(deltas),
            asset_bytes=self.sizes.get(None, 0),
        )


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """One store, one journal, so many threads."""

    store: ObjectStore
    journal: Journal
    schema: Schema
    threads: int
    rates: MeasuredRates
    received: Received = field(default_factory=Received)

    def sets(self, steps: Sequence[PullStep]) -> list[tuple[Edge, PartSet]]:
        """The parts of all steps, through the journal. Raises VerificationFailed, and as the store does."""

        def fetch(step: PullStep, ref: PartRef) -> Part:
            return self._journaled(step.edge, ref)

        before = self.received.total
        with stopwatch() as elapsed:
            sets = self._all(steps, fetch)
        self.rates.fetched(size_bytes=self.received.total - before, took_s=elapsed.seconds)
        return sets

    def build(self, step: PullStep, into: MappedTiles) -> None:
        """Decode the parts of a snapshot into a weights file as they arrive. Raises as `sets` does."""

        def fetch(step: PullStep, ref: PartRef) -> Part:
            data = self._fetched(step.edge, ref)
            with stopwatch() as elapsed:
                part = open_part(data)
                _decode_into(part, into)
            self.rates.decoded(PartKind.SNAPSHOT, size_bytes=len(data), took_s=elapsed.seconds)
            return replace(part, bodies=[memoryview(b"")] * len(part.bodies))

        self._all([step], fetch)

    def assets(self, assets: Sequence[Asset], *, manifest: Manifest) -> None:
        """Bring assets into the journal. Raises VerificationFailed, and as the store does."""
        for asset in assets:
            if self.journal.asset(asset.blob) is None:
                try:
                    content = fetch_part(self.store, asset.blob)
                except CorruptPart as error:
                    raise VerificationFailed(
                        f"{asset.file_name!r} of version {manifest.version} is damaged: {error}",
                        version=manifest.version,
                    ) from error
                self.journal.store(asset.blob, content, kind="asset")
                self.received.add(None, asset.blob.size_bytes)

    def _journaled(self, edge: Edge, ref: PartRef) -> Part:
        part = self.journal.part(ref)
        if part is None:
            self.journal.store(ref, self._fetched(edge, ref))
            part = self.journal.part(ref)
        if part is None:
            raise CorruptPart(f"{ref.key!r} cannot be read back from the journal; the disk is damaged")
        return part

    def _fetched(self, edge: Edge, ref: PartRef) -> bytes:
        with stopwatch() as elapsed:
            data = fetch_part(self.store, ref)
        self.rates.answered(size_bytes=len(data), took_s=elapsed.seconds)
        self.received.add(edge, len(data))
        return data

    def _all(
        self, steps: Sequence[PullStep], fetch: Callable[[PullStep, PartRef], Part]
    ) -> list[tuple[Edge, PartSet]]:
        """All steps at a time; the first fault ends it."""
        with ThreadPoolExecutor(self.threads, thread_name_prefix="weights-pull") as pool:
            pending = [(step, [pool.submit(fetch, step, ref) for ref in step.parts]) for step in steps]
            try:
                return [(step.edge, self._set_of(step, futures)) for step, futures in pending]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _set_of(self, step: PullStep, futures: Sequence[Future[Part]]) -> PartSet:
        try:
            parts = [future.result() for future in futures]
            return joined(parts, kind=kind_of(step.edge), schema=self.schema)
        except CorruptPart as error:
            raise unusable(step.edge, error) from error


def _decode_into(part: Part, into: MappedTiles) -> None:
    """Raises CorruptPart for tiles of another model, before their first element is written."""
    for tile in part.tiles(into.grid.schema):
        tile_snapshot.decode_tile(tile, out=into.elements(tile.spec.name, tile.start, tile.num_elements))
