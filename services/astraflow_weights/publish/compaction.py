"""Which merged deltas and snapshots a log should offer beside its manifests.

Invariant: pure, and the same answer for every reader of the same log, so that two makers make the same
things. `Compactor` carries it out; the version writer asks it about snapshots in manifests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from astraflow_weights.settings import PublishSettings
from astraflow_weights.versions.history import VersionRecord

MERGE_SPANS = (8, 64)
# What could not be made for so many versions is given up: nodes that lag this far take a longer span or a snapshot.
_WINDOW = 128


@dataclass(frozen=True, kw_only=True)
class Span:
    """Versions that one merged delta leads over: from `base_version` to `version`."""

    base_version: int
    version: int


def due_merges(records: Sequence[VersionRecord]) -> Iterator[Span]:
    """Spans of 8 and 64 versions that end at a multiple of their length and are not offered yet.

    Short ones first, for long ones are made of them.
    """
    newest = len(records) - 1
    for length in MERGE_SPANS:
        first = max(length, (newest - _WINDOW) // length * length)
        for version in range(first, newest + 1, length):
            offered = {delta.base_version for delta in records[version].offered_deltas}
            # What was collected is not made again, nor what is made of it; nor what leads over unreadable entries, or
            # versions without a delta.
            span = records[version - length + 1 : version + 1]
            is_broken = any(record.swept or record.damage for record in (records[version - length], *span))
            is_broken |= any(
                record.version - 1 not in (delta.base_version for delta in record.deltas) for record in span
            )
            if version - length not in offered and not is_broken:
                yield Span(base_version=version - length, version=version)


def snapshot_due(records: Sequence[VersionRecord], settings: PublishSettings) -> bool:
    """Whether the newest version should offer a snapshot and does not."""
    if not records or records[-1].damage or records[-1].offered_snapshot is not None:
        return False
    return wants_snapshot(records[:-1], delta_bytes=records[-1].delta_bytes, settings=settings)


def wants_snapshot(
    records: Sequence[VersionRecord], *, delta_bytes: int | None, settings: PublishSettings
) -> bool:
    """Whether the version after `records` should offer a snapshot, given the bytes of its delta (None: it
    has none).
    """
    if delta_bytes is None:
        return True
    chain_bytes = delta_bytes
    for distance, record in enumerate(reversed(records), start=1):
        if record.damage:
            # Nothing may lead here from nothing any more.
            return True
        if (snapshot := record.offered_snapshot) is not None:
            snapshot_bytes = sum(part.size_bytes for part in snapshot)
            too_costly = chain_bytes > settings.snapshot_chain_ratio * snapshot_bytes
            return too_costly or distance >= settings.snapshot_every_versions
        chain_bytes += record.delta_bytes
    return True
