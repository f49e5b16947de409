"""Which parts of a policy must stay, and why.

Invariant: pure. From what is kept every version after the horizon, and every root before it that can be built
at all, can be built from nothing; the horizon is the older of the newest whole snapshots. A path is never
relied upon when one of its parts is missing, nor, while there is another, when a round of collection that was
begun may still delete one. The collector calls `retained` before and after each tombstone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from astraflow_weights.errors import CorruptManifest, Edge, NoPath
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.inspection import parts_by_base
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import PartRef
from astraflow_weights.versions.planner import plan_pull
from astraflow_weights.versions.standing import ServerStanding


@dataclass(frozen=True, kw_only=True)
class Roots:
    """What others need, beside the newest snapshots: pinned versions, versions that nodes serve, and the newest
    one that nodes may activate.
    """

    pinned: frozenset[int] = frozenset()
    served: frozenset[int] = frozenset()
    announced: int | None = None
    standing: ServerStanding | None = None
    """What the server who says so knows; None where no server was asked."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Paths that stay, each with the reason. `lost` are roots that nothing leads to any more, `unreadable` versions
    that should stay and whose entries nobody can read: what these name is not known.
    """

    horizon: int
    paths: Mapping[Edge, str]
    parts: Mapping[bytes, str]
    lost: tuple[int, ...]
    unreadable: tuple[int, ...]


@dataclass(kw_only=True)
class _Kept:
    """Paths kept so far, and what a path consists of."""

    offered: Mapping[Edge, tuple[PartRef, ...]]
    paths: dict[Edge, str] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)

    def add(self, edges: Iterable[Edge], *, why: str) -> None:
        for edge in edges:
            self.paths.setdefault(edge, why)


def retained(
    log: VersionLog,
    roots: Roots,
    *,
    keep_snapshots: int,
    present: Mapping[bytes, int],
    doomed: frozenset[bytes] = frozenset(),
) -> Retention:
    """What must stay of a log that was read. `present` holds the size of each stored part by sha256, `doomed` the
    names in tombstones.
    """
    offered = {edge: parts for record in log.records for edge, parts in paths_of(record)}
    whole = {edge for edge, parts in offered.items() if _is_whole(parts, present)}
    uncertain = {edge for edge in whole if any(part.sha256 in doomed for part in offered[edge])}
    kept = _Kept(offered=offered)
    horizon = _horizon(whole, keep_snapshots=keep_snapshots)
    why = f"newest {keep_snapshots} snapshots and all after"
    kept.add((edge for edge in offered if edge.version > horizon), why=why)
    kept.add((edge for edge in offered if edge == Edge(version=horizon, base_version=None)), why=why)
    planner = _Planner(log, broken=frozenset(set(offered) - whole), uncertain=frozenset(uncertain))
    _add_routes(log, roots, kept=kept, planner=planner, horizon=horizon)
    _add_merges(kept)
    parts = {part.sha256: why for edge, why in kept.paths.items() for part in offered[edge]}
    wanted = roots.pinned | roots.served | {roots.announced}
    return Retention(
        horizon=horizon,
        paths=kept.paths,
        parts=parts,
        lost=tuple(sorted(set(kept.lost))),
        unreadable=tuple(
            record.version
            for record in log.records
            if record.damage and (record.version >= horizon or record.version in wanted)
        ),
    )


def paths_of(record: VersionRecord) -> Iterator[tuple[Edge, tuple[PartRef, ...]]]:
    """Paths to a version that readers may take, and their parts."""
    for base, parts in parts_by_base(record).items():
        yield Edge(version=record.version, base_version=base), parts


def _is_whole(parts: Iterable[PartRef], present: Mapping[bytes, int]) -> bool:
    return all(present.get(part.sha256) == part.size_bytes for part in parts)


def _horizon(whole: set[Edge], *, keep_snapshots: int) -> int:
    """Version of the oldest snapshot that is kept for its age; 0 while there are not enough of them."""
    snapshots = [edge.version for edge in whole if edge.base_version is None]
    newest_first = sorted(snapshots, reverse=True)
    return newest_first[keep_snapshots - 1] if len(newest_first) >= keep_snapshots else 0


@dataclass(frozen=True)
class _Planner:
    """Finds routes over paths that are whole, and if possible not in a tombstone."""

    log: VersionLog
    broken: frozenset[Edge]
    uncertain: frozenset[Edge]

    def route(self, *, held: int | None, target: int) -> list[Edge] | None:
        """Paths of the cheapest route; None when there is none."""
        for avoid in (self.broken | self.uncertain, self.broken):
            try:
                plan = plan_pull(self.log, held=held, target=target, avoid=avoid)
            except (NoPath, CorruptManifest):
                continue
            return [step.edge for step in plan.steps]
        return None


def _add_routes(log: VersionLog, roots: Roots, *, kept: _Kept, planner: _Planner, horizon: int) -> None:
    newest = len(log.records) - 1
    for version, why in _wanted(roots, newest=newest):
        _add_route(kept, planner.route(held=None, target=version), version=version, why=why)
    for version in sorted(roots.served):
        # A node that serves what nothing leads away from takes a snapshot.
        if version < horizon and (route := planner.route(held=version, target=newest)) is not None:
            kept.add(route, why="the path of nodes to the newest version")
    reached: set[int] = set()
    for record in log.records[horizon:]:
        bases = {edge.base_version for edge, _ in paths_of(record) if edge not in planner.broken}
        if None not in bases and reached.isdisjoint(base for base in bases if base is not None):
            route = planner.route(held=None, target=record.version)
            _add_route(kept, route, version=record.version, why="the path to a retained version")
        if not record.damage:
            reached.add(record.version)


def _wanted(roots: Roots, *, newest: int) -> Iterator[tuple[int, str]]:
    for version in sorted(roots.pinned):
        if version <= newest:
            yield version, "pinned"
    if roots.announced is not None and roots.announced <= newest:
        yield roots.announced, "newest announced"


def _add_route(kept: _Kept, route: list[Edge] | None, *, version: int, why: str) -> None:
    if route is None:
        kept.lost.append(version)
    else:
        kept.add(route, why=why)


def _add_merges(kept: _Kept) -> None:
    """A merged delta stays while every delta it was made of does, else it would be made again."""
    for edge in kept.offered:
        base = edge.base_version
        if edge in kept.paths or base is None or base == edge.version - 1:
            continue
        span = range(base + 1, edge.version + 1)
        if all(Edge(version=version, base_version=version - 1) in kept.paths for version in span):
            kept.add([edge], why="merged from kept deltas")
