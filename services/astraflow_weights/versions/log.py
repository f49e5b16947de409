"""A policy's versions as the store's log tells them.

Invariant: it takes in what `History` makes of the entries, beginning at the newest checkpoint that is sound. An entry
that does not verify is asked for again and looked for where copies may be; what cannot be had is reported and passed
over, and asked for at every later refresh. Paths that were added beside the log count only when they lead to a model
root that the log has; damaged ones are passed over, for they are never the only path. Writer, planner and mirror ask
it; it writes nothing. One owner per object: not thread-safe.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from astraflow.errors import IncompatibleError, UnknownVersionError
from astraflow_kit.log import get_logger
from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import CorruptManifest
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.checkpoint import LogCheckpoint, decode_checkpoint, encode_checkpoint
from astraflow_weights.versions.collection_records import Sweep, decode_sweep
from astraflow_weights.versions.fetch import EntryReader, fetch_if_there, fetch_objects
from astraflow_weights.versions.history import History, Owner, VersionRecord
from astraflow_weights.versions.manifest import (
    AddedPath,
    Entry,
    Manifest,
    ManifestEntry,
    decode_path,
)
from astraflow_weights.versions.references.following import References

log = get_logger(__name__)

_READ_THREADS = 8
# Entries are created one after the other: a number that is missing below a higher one was deleted. More of them in a
# row are somebody's strange object.
_MAX_GAP = 64
# Entries that cannot be read and are asked for at each refresh.
_ASKED_AGAIN = 8
REMEDY = "put the object back from a copy of the store, if you have one; newer versions do not need it"
"""What a person can do about an entry that cannot be read."""


class VersionLog:
    """Reads the log of one policy. Starts empty: call `refresh`.

    log = VersionLog(store, run_id="r1", policy_id="solver")
    newest = log.refresh()
    """

    def __init__(self, store: ObjectStore, *, run_id: str, policy_id: str) -> None:
        """Sends no request. Raises ValueError for ids that cannot stand in a key."""
        self.run_id = run_id
        self.policy_id = policy_id
        self.store = store
        self._keys = PolicyKeys(run_id, policy_id)
        self._history = History(run_id=run_id, policy_id=policy_id)
        self.checkpointed = 0
        """First entry that is not in the newest checkpoint that this log began at, or that its owner wrote."""
        self.damaged_checkpoints: tuple[str, ...] = ()
        """Keys of checkpoints that cannot be used: damaged, or of another log."""
        self._entries = EntryReader(store, self._keys)
        self._references = References(store, keys=self._keys, entries=self._entries)
        self._held: dict[int, Manifest] = {}
        self._paths: dict[str, AddedPath] = {}
        self.damaged_paths: tuple[str, ...] = ()
        """Keys of added paths that the last `refresh` passed over: damaged, or made for another log."""
        self._next_round = 0
        self._sweeps: set[str] = set()
        self.damaged_sweeps: tuple[str, ...] = ()
        """Keys of sweeps that cannot be read: paths that they collected are offered, and prove bad."""

    def copy(self) -> "VersionLog":
        """What was read so far, for another owner; nothing is read again."""
        other = VersionLog(self.store, run_id=self.run_id, policy_id=self.policy_id)
        other._history = self._history.copy()
        other.checkpointed, other.damaged_checkpoints = self.checkpointed, self.damaged_checkpoints
        other._entries.rescued, other._held = dict(self._entries.rescued), dict(self._held)
        other._paths, other.damaged_paths = dict(self._paths), self.damaged_paths
        other._next_round, other._sweeps = self._next_round, set(self._sweeps)
        other.damaged_sweeps = self.damaged_sweeps
        return other

    @property
    def next_sequence(self) -> int:
        """First sequence number that this log has not read."""
        return self._history.next_sequence

    @property
    def owner(self) -> Owner | None:
        """Who may write; None for a log without entries."""
        return self._history.owner

    @property
    def num_ignored(self) -> int:
        """Entries of writers that had been fenced before."""
        return self._history.num_ignored

    @property
    def records(self) -> Sequence[VersionRecord]:
        """All known versions; the index is the version. One with `damage` may never have existed."""
        return self._history.records

    @property
    def unreadable(self) -> Mapping[str, str]:
        """What is wrong with each entry that cannot be read, by its key."""
        return {self._keys.entry(each.sequence): each.problem for each in self._history.unreadable.values()}

    @property
    def rescued(self) -> dict[int, bytes]:
        """Entries to be copied: manifests that others refer to, and those that only `latest` holds. Remove what is."""
        return self._entries.rescued

    def refresh(self) -> int | None:
        """Read what was added, entries and paths, and return the newest version that can be read, None when there is
        none.

        Raises CorruptManifest at the first entry that contradicts those before it and IncompatibleError at one of
        another schema, having taken in those before it; Unavailable and StoreRefused as the store does.
        """
        if not self.next_sequence:
            self._begin_at_checkpoint()
        # Listings side by side, and reads side by side: far from the store a request costs a round trip.
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="weights-log") as pool:
            prefixes = (self._keys.merged, self._keys.snapshots)
            listings = [pool.submit(self._listed, prefix) for prefix in prefixes]
            last_round = self._keys.sweep(self._next_round - 1) if self._next_round else ""
            swept = pool.submit(self._listed, self._keys.swept, after=last_round)
            newest = self.refresh_entries()
            listed = [key for listing in listings for key in listing.result()]
            self._refresh_paths(listed, pool)
            self._refresh_sweeps(swept.result(), pool)
        return newest

    def refresh_entries(self) -> int | None:
        """`refresh` without the added paths: all that a writer needs to know before it commits."""
        if not self.next_sequence:
            self._begin_at_checkpoint()
        self._ask_again()
        for data in fetch_objects(self.store, self._new_keys(), threads=_READ_THREADS):
            self.absorb(data)
        newest = self.latest()
        return None if newest is None else newest.version

    def latest(self) -> VersionRecord | None:
        """The newest known version that can be read; asks the store nothing."""
        return self._history.latest()

    def record(self, version: int) -> VersionRecord:
        """A known version. Raises UnknownVersionError: refresh, then ask again; CorruptManifest when its entry cannot
        be read.
        """
        if not 0 <= version < len(self.records):
            raise UnknownVersionError(
                f"version {version} of policy {self.policy_id!r} is not in the log, which ends at "
                f"{len(self.records) - 1}; refresh the log and try again"
            )
        record = self.records[version]
        if record.damage:
            raise self._unusable(record, record.damage)
        return record

    def manifest(self, version: int) -> Manifest:
        """Read the whole manifest of a known version again from the store, with what it refers to.

        Raises UnknownVersionError, CorruptManifest when the entry is gone or changed and no copy is there,
        Unavailable, StoreRefused.
        """
        record = self.record(version)
        if version in self._held:
            return self._held[version]
        data = fetch_if_there(self.store, self._keys.entry(record.sequence))
        entry, _, problem = self._entries.find(record.sequence, data, digest=record.manifest_sha256)
        if isinstance(entry, ManifestEntry):
            return self._references.follow(entry)
        raise self._unusable(record, problem)

    def absorb(self, data: bytes | None) -> Entry | None:
        """Take in the bytes of entry `next_sequence`, None for one that is gone.

        What does not verify is asked for again, then passed over: the answer is None. Raises CorruptManifest for an
        entry that contradicts those before it, IncompatibleError.
        """
        sequence = self.next_sequence
        entry, data, problem = self._entries.find(sequence, data)
        if entry is None:
            log.error("log_entry.unreadable", key=self._keys.entry(sequence), message=f"{problem}; {REMEDY}")
            self._history.pass_over(problem)
            return None
        self._history.take(entry, sha256(data))
        self._entries.note(entry, data)
        return entry

    def restore(self, manifest: Manifest, *, manifest_sha256: bytes) -> None:
        """Take in a version whose entry cannot be read from who holds it: its manifest, and the sha256 of its entry."""
        is_of_here = (manifest.run_id, manifest.policy_id) == (self.run_id, self.policy_id)
        if not is_of_here or manifest.sequence not in self._history.unreadable:
            return
        # One of a log that was begun anew contradicts this one.
        with suppress(CorruptManifest):
            self._history.take_late(manifest, manifest_sha256)
            self._held[manifest.version] = manifest

    def checkpoint(self) -> tuple[str, bytes] | None:
        """Key and content of a checkpoint of what was read; None where a checkpoint has it, or there is nothing."""
        if self._history.anchor is None or self.next_sequence == self.checkpointed:
            return None
        next_round = self._next_round
        while self._keys.sweep(next_round) in self._sweeps:
            next_round += 1
        paths = tuple(self._paths.values())
        checkpoint = LogCheckpoint(history=self._history, paths=paths, next_round=next_round)
        return self._keys.checkpoint(self.next_sequence), encode_checkpoint(checkpoint)

    def _begin_at_checkpoint(self) -> None:
        """Take in the newest checkpoint that is sound and of this log."""
        damaged: list[str] = []
        for key in sorted(self._listed(self._keys.checkpoints), reverse=True):
            try:
                self._take_in(decode_checkpoint(self._keys, fetch_if_there(self.store, key) or b""))
            except (CorruptManifest, IncompatibleError) as error:
                log.warning("log_checkpoint.unusable", key=key, message=error.message)
                damaged.append(key)
            else:
                break
        self.damaged_checkpoints = tuple(damaged)

    def _take_in(self, checkpoint: LogCheckpoint) -> None:
        anchor = checkpoint.history.anchor
        assert anchor is not None
        found = fetch_if_there(self.store, self._keys.entry(anchor.sequence))
        # One that is damaged is the same one: nobody writes over an entry.
        if found is None or (
            sha256(found) != anchor.sha256 and self._entries.read(found, anchor.sequence)[0]
        ):
            raise CorruptManifest(
                f"it was made of another log: entry {anchor.sequence} is not the one it names"
            )
        self._history = checkpoint.history
        self.checkpointed = self.next_sequence
        self._next_round = checkpoint.next_round
        self._paths = {path_key(self._keys, path): path for path in checkpoint.paths}

    def _ask_again(self) -> None:
        """The newest entries that could not be read: perhaps they can be now, or a copy lies beside them."""
        for sequence in sorted(self._history.unreadable)[-_ASKED_AGAIN:]:
            found = fetch_if_there(self.store, self._keys.entry(sequence))
            entry, data, _ = self._entries.find(sequence, found, attempts=1)
            if entry is not None:
                with suppress(CorruptManifest):
                    self._history.take_late(entry, sha256(data))
                    log.info("log_entry.readable", key=self._keys.entry(sequence))

    def _unusable(self, record: VersionRecord, problem: str) -> CorruptManifest:
        key = self._keys.entry(record.sequence)
        return CorruptManifest(
            f"version {record.version} of policy {self.policy_id!r} cannot be read: log entry {key!r}: {problem}; "
            f"{REMEDY}"
        )

    def _listed(self, prefix: str, *, after: str = "") -> list[str]:
        return [info.key for info in self.store.list(prefix, after=after)]

    def _refresh_paths(self, listed: Sequence[str], pool: ThreadPoolExecutor) -> None:
        """Believe the listing: paths that were collected are gone, and only new ones are read."""
        new = [key for key in listed if key not in self._paths and key not in self.damaged_paths]
        damaged = [key for key in self.damaged_paths if key in listed]
        paths = {key: self._paths[key] for key in listed if key in self._paths}
        for key, content in zip(new, pool.map(partial(fetch_if_there, self.store), new), strict=True):
            if content is None:
                # Collected since it was listed.
                continue
            try:
                path = decode_path(content)
            except (CorruptManifest, IncompatibleError):
                damaged.append(key)
                continue
            if path.version >= len(self.records) or self.records[path.version].damage:
                # Its version was committed since the entries were listed, or cannot be read: read again next time.
                continue
            if self._fits(path, key):
                paths[key] = path
            else:
                damaged.append(key)
        self._paths, self.damaged_paths = paths, tuple(damaged)
        self._take_in_paths()

    def _refresh_sweeps(self, listed: Sequence[str], pool: ThreadPoolExecutor) -> None:
        """Take in what was collected; a sweep is never changed or deleted."""
        new, damaged = [key for key in listed if key not in self._sweeps], []
        for key, content in zip(new, pool.map(partial(fetch_if_there, self.store), new), strict=True):
            try:
                sweep = decode_sweep(self._keys, content or b"")
            except (CorruptManifest, IncompatibleError):
                damaged.append(key)
            else:
                self._take_in_sweep(key, sweep)
        self.damaged_sweeps = tuple(damaged)

    def _take_in_sweep(self, key: str, sweep: Sweep) -> None:
        known = [edge for edge in sweep.paths if edge.version < len(self._history.records)]
        for edge in known:
            record = self._history.records[edge.version]
            self._history.records[edge.version] = replace(record, swept=record.swept | {edge.base_version})
        if len(known) == len(sweep.paths):
            # Else it is about versions committed since the entries were listed: read again at the next refresh.
            self._sweeps.add(key)

    def _fits(self, path: AddedPath, key: str) -> bool:
        here = (path.run_id, path.policy_id) == (self.run_id, self.policy_id)
        root = self._history.records[path.version].model_root
        return here and path.model_root == root and key == path_key(self._keys, path)

    def _take_in_paths(self) -> None:
        by_version: dict[int, list[AddedPath]] = {}
        for path in self._paths.values():
            by_version.setdefault(path.version, []).append(path)
        for version, record in enumerate(self._history.records):
            added = tuple(by_version.get(version, ()))
            if added != record.added:
                self._history.records[version] = replace(record, added=added)

    def _new_keys(self) -> list[str]:
        """Keys of the entries that follow; a store may list late, but an entry below another one was there."""
        after = self._keys.entry(self.next_sequence - 1) if self.next_sequence else self._keys.entries
        listed = {self._keys.sequence_in(key) for key in self._listed(self._keys.entries, after=after)}
        end = self.next_sequence
        for sequence in sorted(number for number in listed if number is not None):
            if end <= sequence <= end + _MAX_GAP:
                end = sequence + 1
        return [self._keys.entry(sequence) for sequence in range(self.next_sequence, end)]


def path_key(keys: PolicyKeys, path: AddedPath) -> str:
    """The one key under which an added path counts."""
    if path.base_version is None:
        return keys.snapshot(path.version)
    return keys.merged_delta(path.base_version, path.version)
