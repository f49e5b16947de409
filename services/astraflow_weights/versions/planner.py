"""Chooses how to get from one version to another.

Invariant: of all paths that the log offers, the plan takes the least time by the costs given, and of equals the fewest
steps; by the priors that is the path with the fewest bytes, as long as as many answers are waited for. It never
guesses about versions the log has not read. Pure; the mirror calls `plan_pull`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.errors import Edge, NoPath
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import PartRef
from astraflow_weights.versions.rates import PullCosts


@dataclass(frozen=True, kw_only=True)
class PullStep:
    """One snapshot or delta to fetch."""

    edge: Edge
    parts: tuple[PartRef, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class PullPlan:
    """Steps in the order they are applied; empty when the target is held. `held` is the version they start
    from, None when they start with a snapshot.
    """

    held: int | None
    target: int
    steps: tuple[PullStep, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all steps."""
        return sum(step.size_bytes for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class _Path:
    """One path to a version; `last` is None for the version that is held."""

    bytes_s: float = 0.0
    objects: int = 0
    num_steps: int = 0
    last: PullStep | None = None
    before: "_Path | None" = None

    def then(self, step: PullStep, costs: PullCosts) -> "_Path":
        kind = PartKind.SNAPSHOT if step.edge.base_version is None else PartKind.DELTA
        return _Path(
            bytes_s=self.bytes_s + costs.bytes_s(step.size_bytes, kind),
            objects=self.objects + len(step.parts),
            num_steps=self.num_steps + 1,
            last=step,
            before=self,
        )

    def rank(self, costs: PullCosts) -> tuple[float, int]:
        """By time, rounded so that equal sums of bytes are equal, then by steps."""
        return round(self.bytes_s + costs.requests_s(self.objects), _DIGITS), self.num_steps

    @property
    def steps(self) -> tuple[PullStep, ...]:
        """All of them, the first one first."""
        steps: list[PullStep] = []
        path: _Path | None = self
        while path is not None and path.last is not None:
            steps.append(path.last)
            path = path.before
        return tuple(reversed(steps))


_NOTHING = _Path()
# A byte takes some nanoseconds.
_DIGITS = 9
# Paths to one version that are kept: cheaper ones in bytes and cheaper ones in requests.
_MAX_WAYS = 16


def plan_pull(
    log: VersionLog,
    *,
    held: int | None,
    target: int,
    avoid: frozenset[Edge] = frozenset(),
    costs: PullCosts | None = None,
) -> PullPlan:
    """Cheapest plan from `held` (None: nothing) to `target`, without the edges in `avoid`.

    Raises UnknownVersionError when the log has not read `target`, NoPath when nothing leads there.
    """
    log.record(target)
    costs = costs or PullCosts()
    paths: dict[int, list[_Path]] = {} if held is None else {held: [_NOTHING]}
    # A delta always leads to a higher version, so one pass in order of versions settles every path.
    for record in log.records[: target + 1]:
        candidates = _paths_to(record, paths, costs=costs)
        good = [path for path in candidates if path.last is None or path.last.edge not in avoid]
        if good:
            paths[record.version] = _useful(good, costs=costs)
    if target not in paths:
        raise NoPath(
            f"nothing usable leads to version {target} of policy {log.policy_id!r} from {held}; "
            f"{len(avoid)} paths proved bad: wait for the next snapshot, or restore the store's objects"
        )
    steps = paths[target][0].steps
    start = steps[0].edge.base_version if steps else target
    return PullPlan(held=start, target=target, steps=steps)


def _paths_to(record: VersionRecord, paths: dict[int, list[_Path]], *, costs: PullCosts) -> Iterator[_Path]:
    yield from paths.get(record.version, ())
    if (snapshot := record.offered_snapshot) is not None:
        edge = Edge(version=record.version, base_version=None)
        yield _NOTHING.then(PullStep(edge=edge, parts=snapshot), costs)
    for delta in record.offered_deltas:
        edge = Edge(version=record.version, base_version=delta.base_version)
        step = PullStep(edge=edge, parts=delta.parts)
        for path in paths.get(delta.base_version, ()):
            yield path.then(step, costs)


def _useful(paths: Sequence[_Path], *, costs: PullCosts) -> list[_Path]:
    """The best path first, then those that need fewer requests: requests are answered side by side, so one more may
    cost nothing or a whole answer, and which it is shows only at the end.
    """
    kept: list[_Path] = []
    for path in sorted(paths, key=lambda path: (*path.rank(costs), path.objects)):
        if not kept or path.objects < kept[-1].objects:
            kept.append(path)
    return kept[:_MAX_WAYS]
