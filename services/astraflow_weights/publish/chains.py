"""The deltas between two versions of a log as one delta.

Invariant: what is returned leads from the one version to the other bit by bit, made of parts that had the sha256
of their references; no model is fetched unless a tile counts inside classes of the base's values. The compactor
calls it, and so does a rollback.
"""

from dataclasses import dataclass

from astraflow_weights.codec.merge import merge_deltas
from astraflow_weights.codec.tensors import Model
from astraflow_weights.errors import CorruptPart, Edge, NeedsBase
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.inspection import build_version
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.planner import PullPlan, plan_pull


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """One delta; `base` is the model before it, None when it was not needed."""

    parts: list[bytes]
    base: Model | None


def chained_delta(
    store: ObjectStore, log: VersionLog, *, base_version: int, version: int, threads: int
) -> Chain:
    """The cheapest chain of deltas from `base_version` to `version`, merged; without any model where it can be.

    A merged delta that is damaged is passed over for those of the manifests. Raises NoPath, CorruptPart,
    VerificationFailed, and as the store does.
    """
    plan = _plan(log, base_version=base_version, version=version, merged=True)
    try:
        return _merged(store, log, plan, threads=threads)
    except CorruptPart:
        if all(_length(step.edge) == 1 for step in plan.steps):
            raise
        # Perhaps a merged delta among them; the deltas of the manifests may still be good.
        plan = _plan(log, base_version=base_version, version=version, merged=False)
        return _merged(store, log, plan, threads=threads)


def _plan(log: VersionLog, *, base_version: int, version: int, merged: bool) -> PullPlan:
    """Cheapest deltas; only those of the manifests unless `merged`. Raises NoPath."""
    records = log.records[: version + 1]
    avoid = {Edge(version=record.version, base_version=None) for record in records}
    if not merged:
        avoid |= {
            Edge(version=path.version, base_version=path.base_version) for r in records for path in r.added
        }
    return plan_pull(log, held=base_version, target=version, avoid=frozenset(avoid))


def _merged(store: ObjectStore, log: VersionLog, plan: PullPlan, *, threads: int) -> Chain:
    deltas = [[fetch_part(store, ref) for ref in step.parts] for step in plan.steps]
    schema = log.manifest(plan.steps[-1].edge.version).schema
    try:
        return Chain(parts=merge_deltas(deltas, schema=schema), base=None)
    except NeedsBase:
        assert plan.held is not None
        base = build_version(store, log, target=plan.held, threads=threads)
        return Chain(parts=merge_deltas(deltas, schema=schema, base=base), base=base)


def _length(edge: Edge) -> int:
    assert edge.base_version is not None
    return edge.version - edge.base_version
