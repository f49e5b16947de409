"""Proves, or disproves, that a stored version can be had bit by bit by every path that it offers.

Invariant: a version without faults was rebuilt here once by each of its paths, from nothing, and every part,
asset, tensor and the root had the digest of the sealed manifest. Changes nothing. `astraflow weights verify`
calls it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.errors import CorruptManifest, CorruptPart, Edge, NoPath, VerificationFailed
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.inspection import buildable, parts_by_base
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import Manifest, PartRef
from astraflow_weights.versions.planner import plan_pull
from astraflow_weights.versions.pull import pull


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is not what the manifest says.

    `version` may be older than the one that was verified: one that it is built on. `part` is the key of a
    part, asset, added path or log entry, `tensor` a name; each is empty when the fault is not in one.
    """

    version: int
    problem: str
    part: str = ""
    tensor: str = ""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was checked of one version, and what is wrong with it."""

    version: int
    paths: int
    objects: int
    tensors: int
    model_root: bytes
    faults: tuple[Fault, ...]


def verify_version(store: ObjectStore, log: VersionLog, *, version: int, threads: int) -> Verification:
    """Read everything a version names and rebuild it by each of its paths. Holds the model in memory.

    Raises UnknownVersionError, Unavailable, StoreRefused.
    """
    try:
        manifest, record = log.manifest(version), log.record(version)
    except CorruptManifest as error:
        return _unreadable(log, version=version, problem=error.message)
    paths = {Edge(version=version, base_version=base): refs for base, refs in parts_by_base(record).items()}
    parts = [ref for refs in paths.values() for ref in refs]
    assets = [asset.blob for asset in manifest.assets]
    faults = _object_faults(
        parts, version=version, threads=threads, check=lambda ref: open_part(fetch_part(store, ref))
    )
    faults += _object_faults(
        assets, version=version, threads=threads, check=lambda ref: fetch_part(store, ref)
    )
    faults += _damaged_paths(log, keys=PolicyKeys(log.run_id, log.policy_id), version=version)
    broken = {fault.part for fault in faults}
    if not paths:
        problem = "the parts of every path to it were collected; pin versions that must stay"
        faults.append(Fault(version=version, problem=problem))
    possible = buildable(log)
    for edge, refs in paths.items():
        # A path with a damaged part is reported already, by that part. One from a version that was collected serves who
        # still holds that one; here nobody does.
        from_nothing = edge.base_version is None or edge.base_version in possible
        if from_nothing and broken.isdisjoint(ref.key for ref in refs):
            avoid = frozenset(paths) - {edge}
            faults += _rebuild_faults(store, log, manifest=manifest, avoid=avoid, threads=threads)
    return Verification(
        version=version,
        paths=len(paths),
        objects=len(parts) + len(assets),
        tensors=len(manifest.tensors),
        model_root=manifest.model_root,
        faults=tuple(dict.fromkeys(faults)),
    )


def _unreadable(log: VersionLog, *, version: int, problem: str) -> Verification:
    keys, record = PolicyKeys(log.run_id, log.policy_id), log.records[version]
    fault = Fault(version=version, part=keys.entry(record.sequence), problem=problem)
    return Verification(
        version=version, paths=0, objects=0, tensors=0, model_root=record.model_root, faults=(fault,)
    )


def _damaged_paths(log: VersionLog, *, keys: PolicyKeys, version: int) -> list[Fault]:
    """Paths added to this version that every reader passes over."""
    of_version = {keys.snapshot(version), *(keys.merged_delta(base, version) for base in range(version))}
    problem = "an added path is damaged or was made for another log; readers pass it over"
    return [
        Fault(version=version, part=key, problem=problem) for key in log.damaged_paths if key in of_version
    ]


def _object_faults(
    refs: Sequence[PartRef], *, version: int, threads: int, check: Callable[[PartRef], object]
) -> list[Fault]:
    def problem(ref: PartRef) -> str:
        try:
            check(ref)
        except CorruptPart as error:
            return error.message
        return ""

    with ThreadPoolExecutor(threads, thread_name_prefix="weights-verify") as pool:
        found = zip(refs, pool.map(problem, refs), strict=True)
        return [Fault(version=version, part=ref.key, problem=text) for ref, text in found if text]


def _rebuild_faults(
    store: ObjectStore, log: VersionLog, *, manifest: Manifest, avoid: frozenset[Edge], threads: int
) -> list[Fault]:
    """What hinders building the version from nothing without the paths in `avoid`."""
    try:
        plan = plan_pull(log, held=None, target=manifest.version, avoid=avoid)
        pull(store, plan, manifest=manifest, threads=threads)
    except NoPath as error:
        return [Fault(version=manifest.version, problem=error.message)]
    except VerificationFailed as failure:
        return [Fault(version=failure.version, tensor=failure.tensor, problem=failure.message)]
    return []
