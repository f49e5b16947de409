"""Chooses how to get from one version to another.

Invariant: of all ways that the log offers, the plan has the fewest bytes, and of equals the fewest steps;
it never guesses about versions the log has not read. Pure; the mirror calls `plan_pull`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from astraflow_weights.errors import Edge, NoPath
from astraflow_weights.manifest import PartRef
from astraflow_weights.version_log import VersionLog, VersionRecord


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
class _Way:
    """Cheapest way known to a version; `last` is None for the version that is held."""

    cost_bytes: int
    num_steps: int
    last: PullStep | None

    @property
    def rank(self) -> tuple[int, int]:
        return self.cost_bytes, self.num_steps

    def then(self, step: PullStep) -> "_Way":
        return _Way(cost_bytes=self.cost_bytes + step.size_bytes, num_steps=self.num_steps + 1, last=step)


_NOTHING = _Way(cost_bytes=0, num_steps=0, last=None)


def plan_pull(
    log: VersionLog, *, held: int | None, target: int, avoid: frozenset[Edge] = frozenset()
) -> PullPlan:
    """Cheapest plan from `held` (None: nothing) to `target`, without the edges in `avoid`.

    Raises UnknownVersionError when the log has not read `target`, NoPath when nothing leads there.
    """
    log.record(target)
    ways: dict[int, _Way] = {} if held is None else {held: _NOTHING}
    # A delta always leads to a higher version, so one pass in order of versions settles every way.
    for record in log.records[: target + 1]:
        candidates = _ways_to(record, ways)
        good = [way for way in candidates if way.last is None or way.last.edge not in avoid]
        if good:
            ways[record.version] = min(good, key=lambda way: way.rank)
    if target not in ways:
        raise NoPath(
            f"nothing usable leads to version {target} of policy {log.policy_id!r} from {held}; "
            f"{len(avoid)} ways proved bad: wait for the next snapshot, or restore the store's objects"
        )
    return PullPlan(held=_start(ways, target), target=target, steps=_steps(ways, target))


def _ways_to(record: VersionRecord, ways: dict[int, _Way]) -> Iterator[_Way]:
    if record.version in ways:
        yield ways[record.version]
    if (snapshot := record.offered_snapshot) is not None:
        edge = Edge(version=record.version, base_version=None)
        yield _NOTHING.then(PullStep(edge=edge, parts=snapshot))
    for delta in record.offered_deltas:
        if delta.base_version in ways:
            edge = Edge(version=record.version, base_version=delta.base_version)
            yield ways[delta.base_version].then(PullStep(edge=edge, parts=delta.parts))


def _steps(ways: dict[int, _Way], target: int) -> tuple[PullStep, ...]:
    steps: list[PullStep] = []
    version: int | None = target
    while version is not None and (last := ways[version].last) is not None:
        steps.append(last)
        version = last.edge.base_version
    return tuple(reversed(steps))


def _start(ways: dict[int, _Way], target: int) -> int | None:
    steps = _steps(ways, target)
    return steps[0].edge.base_version if steps else target
