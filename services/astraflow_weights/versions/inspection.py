"""What stored versions are: how their bytes are encoded, what they cost to reach, where two of them differ.

Invariant: reads the store and changes nothing; every byte that is counted or compared was checked against its
digest first. `astraflow weights` calls it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tensors import Array, TensorSpec, flat_unsigned, require_same_specs
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.errors import NoPath
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import stored_leases
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import PartRef
from astraflow_weights.versions.planner import plan_pull
from astraflow_weights.versions.pull import pull

_LAGS = (1, 8)


@dataclass(frozen=True, kw_only=True)
class CodecShare:
    """What one codec contributes to a path; framing and tables are not counted."""

    codec: TileCodec
    tiles: int
    body_bytes: int
    num_changed: int


@dataclass(frozen=True, kw_only=True)
class OfferedPath:
    """A snapshot (`base_version` is None) or delta that a version offers."""

    base_version: int | None
    parts: int
    size_bytes: int
    codecs: tuple[CodecShare, ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    """The cheapest plan to a version for a node that holds `held`; `steps` and `size_bytes` are None when
    nothing leads there.
    """

    held: int | None
    steps: int | None
    size_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RunningPull:
    """A pull that leased parts of a version, `parts` of all its `all_parts`; it may be on its way to another.

    `holder` is a number that the puller drew: nothing in the store tells which node it is.
    """

    holder: str
    parts: int
    all_parts: int
    expires_time_s: float


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """How far one tensor differs between two versions."""

    spec: TensorSpec
    num_changed: int

    @property
    def share(self) -> float:
        """Changed share of its elements; 0 for a tensor without elements."""
        return self.num_changed / self.spec.num_elements if self.spec.num_elements else 0.0


def parts_by_base(record: VersionRecord) -> dict[int | None, tuple[PartRef, ...]]:
    """Parts of every path to a version, made with its manifest or added since, by base; None is the snapshot."""
    paths: dict[int | None, tuple[PartRef, ...]] = {}
    if (snapshot := record.offered_snapshot) is not None:
        paths[None] = snapshot
    return paths | {delta.base_version: delta.parts for delta in record.offered_deltas}


def offered_paths(store: ObjectStore, record: VersionRecord, *, threads: int) -> list[OfferedPath]:
    """The paths to a version, its own parts read and opened. Raises CorruptPart, and as the store does."""
    return [
        OfferedPath(
            base_version=base,
            parts=len(parts),
            size_bytes=sum(part.size_bytes for part in parts),
            codecs=_codec_shares(store, parts, threads=threads),
        )
        for base, parts in parts_by_base(record).items()
    ]


def buildable(log: VersionLog) -> frozenset[int]:
    """Versions that can be had from nothing; what older ones are without was collected."""
    found: set[int] = set()
    for record in log.records:
        bases = {delta.base_version for delta in record.offered_deltas}
        if record.offered_snapshot is not None or not found.isdisjoint(bases):
            found.add(record.version)
    return frozenset(found)


def routes(log: VersionLog, *, target: int) -> list[Route]:
    """Cheapest routes from nothing, from the version before and from eight versions before, as far as they
    exist.
    """
    held: list[int | None] = [None, *(target - lag for lag in _LAGS if target >= lag)]
    return [_route(log, held=start, target=target) for start in held]


def running_pulls(
    store: ObjectStore, keys: PolicyKeys, record: VersionRecord, *, now_s: float
) -> list[RunningPull]:
    """Leases on parts of a version that hold now, the one that ends first first."""
    names = {part.sha256 for parts in parts_by_base(record).values() for part in parts}
    found = []
    for _, lease in stored_leases(store, keys=keys):
        if lease.expires_time_s > now_s and (mine := names & lease.parts):
            found.append(
                RunningPull(
                    holder=lease.holder.hex(),
                    parts=len(mine),
                    all_parts=len(lease.parts),
                    expires_time_s=lease.expires_time_s,
                )
            )
    return sorted(found, key=lambda pull: pull.expires_time_s)


def build_version(
    store: ObjectStore,
    log: VersionLog,
    *,
    target: int,
    held: int | None = None,
    load_base: Callable[[], dict[str, Array]] = dict,
    threads: int,
) -> dict[str, Array]:
    """Tensors of a version, in memory and verified, by the cheapest plan from `held`.

    `load_base` gives the tensors of `held`, which may be changed. Raises as `plan_pull` and `pull` do.
    """
    plan = plan_pull(log, held=held, target=target)
    return pull(store, plan, manifest=log.manifest(target), load_base=load_base, threads=threads)


def changes_between(
    store: ObjectStore, log: VersionLog, *, first: int, second: int, threads: int
) -> list[TensorChange]:
    """Changed elements of every tensor between two versions, by name; nothing is fetched for equal ones.

    Raises ModelMismatch when their tensors are not the same; VerificationFailed and NoPath when one of them
    cannot be built; as the store does.
    """
    older, newer = sorted((first, second))
    specs = [tensor.spec for tensor in log.manifest(newer).tensors]
    require_same_specs([tensor.spec for tensor in log.manifest(older).tensors], specs)
    if log.record(older).model_root == log.record(newer).model_root:
        return [TensorChange(spec=spec, num_changed=0) for spec in specs]
    before = build_version(store, log, target=older, threads=threads)
    after = build_version(
        store,
        log,
        target=newer,
        held=older,
        load_base=lambda: {name: array.copy() for name, array in before.items()},
        threads=threads,
    )
    return [
        TensorChange(spec=spec, num_changed=_count_changed(before[spec.name], after[spec.name]))
        for spec in specs
    ]


def _count_changed(before: Array, after: Array) -> int:
    return int(np.count_nonzero(flat_unsigned(before) != flat_unsigned(after)))


def _route(log: VersionLog, *, held: int | None, target: int) -> Route:
    try:
        plan = plan_pull(log, held=held, target=target)
    except NoPath:
        # Worth showing: such a node would have to wait for a snapshot.
        return Route(held=held, steps=None, size_bytes=None)
    return Route(held=held, steps=len(plan.steps), size_bytes=plan.size_bytes)


def _codec_shares(store: ObjectStore, parts: Sequence[PartRef], *, threads: int) -> tuple[CodecShare, ...]:
    """One share per codec that occurs, by codec."""
    found: dict[TileCodec, list[int]] = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-inspect") as pool:
        for counts in pool.map(lambda ref: _counts_by_codec(fetch_part(store, ref)), parts):
            for codec, figures in counts.items():
                so_far = found.setdefault(codec, [0, 0, 0])
                found[codec] = [old + new for old, new in zip(so_far, figures, strict=True)]
    return tuple(
        CodecShare(
            codec=codec, tiles=found[codec][0], body_bytes=found[codec][1], num_changed=found[codec][2]
        )
        for codec in sorted(found)
    )


def _counts_by_codec(data: bytes) -> dict[TileCodec, list[int]]:
    """Tiles, body bytes and changed elements; the part itself is not kept."""
    counts: dict[TileCodec, list[int]] = {}
    part = open_part(data)
    for codec, body, changed in zip(part.codecs, part.bodies, part.num_changed.tolist(), strict=True):
        figures = counts.setdefault(codec, [0, 0, 0])
        figures[0] += 1
        figures[1] += len(body)
        figures[2] += changed
    return counts
