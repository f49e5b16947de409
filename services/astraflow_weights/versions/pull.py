"""Carries out a pull plan in memory, and says how a pull fails.

Invariant: what `pull` returns is exactly the target version: every part had the sha256 of its reference,
and every resulting tensor has the digest of the manifest. `inspection` calls it for tools, merges and rollbacks; a
node's mirror, which applies its plans in place, shares the counts and the failures.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

from astraflow_weights.codec import apply_delta, decode_snapshot
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tensors import Array
from astraflow_weights.errors import CorruptPart, Edge, VerificationFailed
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.manifest import Manifest
from astraflow_weights.versions.planner import PullPlan, PullStep

_MAX_BYTES = MirrorSettings().max_model_bytes


@dataclass(frozen=True, kw_only=True)
class PullCounts:
    """Snapshots and deltas taken, tiles repaired, and bytes fetched, by kind."""

    snapshots_fetched: int = 0
    snapshot_bytes: int = 0
    deltas_fetched: int = 0
    delta_bytes: int = 0
    asset_bytes: int = 0
    repaired_tiles: int = 0
    repair_bytes: int = 0

    def __add__(self, other: "PullCounts") -> "PullCounts":
        names = [field.name for field in fields(self)]
        return PullCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __sub__(self, other: "PullCounts") -> "PullCounts":
        names = [field.name for field in fields(self)]
        return PullCounts(**{name: getattr(self, name) - getattr(other, name) for name in names})

    @property
    def fetched_bytes(self) -> int:
        """All bytes fetched."""
        return self.snapshot_bytes + self.delta_bytes + self.asset_bytes + self.repair_bytes


def pull(
    store: ObjectStore,
    plan: PullPlan,
    *,
    manifest: Manifest,
    load_base: Callable[[], dict[str, Array]] = dict,
    threads: int,
    max_bytes: int = _MAX_BYTES,
) -> dict[str, Array]:
    """Tensors of the plan's target. `load_base` gives a copy of the held version that may be changed.

    Raises VerificationFailed naming the suspected edges; Unavailable and StoreRefused as the store does.
    """
    check_size(manifest, max_bytes=max_bytes)
    parts = _fetch(store, plan, threads=threads)
    model = load_base() if plan.held is not None else {}
    for step, step_parts in zip(plan.steps, parts, strict=True):
        model = _apply(step, step_parts, model, schema=manifest.schema, max_bytes=manifest.size_bytes)
    _verify(model, manifest, plan)
    return model


def check_size(manifest: Manifest, *, max_bytes: int) -> None:
    """Raises VerificationFailed for a model that unfolds to more than is allowed here."""
    if manifest.size_bytes > max_bytes:
        raise VerificationFailed(
            f"version {manifest.version} unfolds to {manifest.size_bytes} bytes; the limit is {max_bytes}: "
            "raise max_model_bytes",
            version=manifest.version,
        )


def unusable(
    edge: Edge, error: CorruptPart, *, tensor: str = "", tile: int | None = None
) -> VerificationFailed:
    """The failure that a damaged path is."""
    path = "snapshot" if edge.base_version is None else f"delta from version {edge.base_version}"
    return VerificationFailed(
        f"the {path} of version {edge.version} cannot be used: {error}",
        version=edge.version,
        tensor=tensor,
        tile=tile,
        edges=frozenset({edge}),
    )


def came_out_different(
    manifest: Manifest, wrong: Sequence[str], *, edges: frozenset[Edge]
) -> VerificationFailed:
    """The failure that sound parts are which lead to other tensors, `wrong`, than the manifest's."""
    return VerificationFailed(
        f"version {manifest.version} came out different in {len(wrong)} of {len(manifest.tensors)} tensors, "
        f"first {wrong[0]!r}: its deltas or its snapshot do not belong together",
        version=manifest.version,
        tensor=wrong[0],
        edges=edges,
    )


def _fetch(store: ObjectStore, plan: PullPlan, *, threads: int) -> list[list[bytes]]:
    """Parts of every step, all steps at a time."""
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-pull") as pool:
        pending = [[pool.submit(fetch_part, store, ref) for ref in step.parts] for step in plan.steps]
        try:
            return [_collect(step, futures) for step, futures in zip(plan.steps, pending, strict=True)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _collect(step: PullStep, futures: Sequence[Future[bytes]]) -> list[bytes]:
    try:
        return [future.result() for future in futures]
    except CorruptPart as error:
        raise unusable(step.edge, error) from error


def _apply(
    step: PullStep, parts: list[bytes], model: dict[str, Array], *, schema: Schema, max_bytes: int
) -> dict[str, Array]:
    try:
        if step.edge.base_version is None:
            return decode_snapshot(parts, schema=schema, max_bytes=max_bytes)
        apply_delta(model, parts)
    except CorruptPart as error:
        raise unusable(step.edge, error) from error
    return model


def _verify(model: dict[str, Array], manifest: Manifest, plan: PullPlan) -> None:
    found = {tensor.spec.name: tensor for tensor in tensor_digests(model)}
    wanted = {tensor.spec.name: tensor for tensor in manifest.tensors}
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if wrong:
        raise came_out_different(manifest, wrong, edges=frozenset(step.edge for step in plan.steps))
