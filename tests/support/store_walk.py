"""Every version of a policy's store, fetched and compared with its manifest.

`walk_store` goes through the log as a node that starts from nothing would, version by version, and through
each version's own parts. Used by `support.audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import AstraflowError
from astraflow_weights.digest import sha256
from astraflow_weights.mirror import Mirror
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.version_log import VersionLog, VersionRecord


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """One committed version."""

    version: int
    step: int
    manifest_sha256: str


def walk_store(
    store: Path, run_id: str, policy: str, *, scratch: Path, report: Callable[[str], None]
) -> Iterator[StoredVersion]:
    """Yield every committed version; report what is torn, missing or different from its manifest."""
    objects = open_store(store.as_uri())
    log = VersionLog(objects, run_id=run_id, policy_id=policy)
    log.refresh()
    mirror = Mirror(scratch)
    for record in log.records:
        _check_parts(objects, record, report)
        try:
            result = mirror.advance(objects, log, target=record.version)
        except AstraflowError as error:
            report(f"version {record.version} cannot be fetched: {error.message}")
        else:
            if result.rejected:
                report(f"version {record.version} has ways that do not verify: {sorted(result.rejected)}")
        yield StoredVersion(
            version=record.version, step=record.step, manifest_sha256=record.manifest_sha256.hex()
        )


def _check_parts(objects: ObjectStore, record: VersionRecord, report: Callable[[str], None]) -> None:
    parts = [*(record.snapshot or ()), *(part for delta in record.deltas for part in delta.parts)]
    for part in parts:
        try:
            data = objects.get(part.key)
        except AstraflowError as error:
            report(f"version {record.version}: part {part.key} cannot be read: {error.message}")
            continue
        if len(data) != part.size_bytes or sha256(data) != part.sha256:
            report(f"version {record.version}: part {part.key} is torn")
