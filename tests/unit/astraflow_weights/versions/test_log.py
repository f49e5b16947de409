"""Readers agree on versions: epochs never fall along the sequence, and contradictions are refused."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from astraflow.errors import IncompatibleError, UnknownVersionError
from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.schema import Schema
from astraflow_weights.errors import CorruptManifest, Edge
from astraflow_weights.store import ObjectInfo
from astraflow_weights.versions import manifest as entries
from astraflow_weights.versions.collection_records import Sweep, encode_sweep
from astraflow_weights.versions.log import VersionLog, path_key
from support.log_records import PART, TENSORS, added_path, fence, manifest, nonce
from support.published_models import read_log
from support.weight_models import KEYS, POLICY, RUN, FaultyStore, overwrite

# Only what is wrong waits as long.
TOGETHER_S = 30.0


def write(store: FaultyStore, *added: entries.Entry) -> VersionLog:
    for entry in added:
        store.put_if_absent(KEYS.entry(entry.sequence), entries.encode_entry(entry))
    schema = Schema.of(tensor.spec for tensor in TENSORS)
    store.put_if_absent(KEYS.schema(schema.digest.hex()), schema.content)
    return VersionLog(store, run_id=RUN, policy_id=POLICY)


def test_an_empty_log_has_no_version(store: FaultyStore) -> None:
    log = write(store)
    assert log.refresh() is None
    assert log.latest() is None
    assert log.owner is None


def test_versions_are_counted_over_manifests_only(store: FaultyStore) -> None:
    write(store, fence(0), manifest(1, version=0), manifest(2, version=1))
    log = write(store, fence(3, epoch=2), manifest(4, epoch=2, version=2))
    assert log.refresh() == 2
    assert [record.sequence for record in log.records] == [1, 2, 4]
    assert log.next_sequence == 5


def test_a_zombie_wastes_a_number_and_wins_none(store: FaultyStore) -> None:
    write(store, fence(0), manifest(1, version=0), fence(2, epoch=2))
    log = write(store, manifest(3, version=1), fence(4), manifest(5, epoch=2, version=1))
    assert log.refresh() == 1
    assert [(record.sequence, record.writer_epoch) for record in log.records] == [(1, 1), (5, 2)]
    assert log.num_ignored == 2
    assert log.owner is not None
    assert (log.owner.epoch, log.owner.nonce) == (2, nonce(2))


@pytest.mark.parametrize("found", [1, 99], ids=["older", "newer"])
def test_a_log_of_another_release_is_refused_and_not_passed_over(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    with monkeypatch.context() as of_that_release:
        of_that_release.setattr(entries, "SCHEMA_VERSION", found)
        log = write(store, fence(0), manifest(1, version=0))
    with pytest.raises(IncompatibleError, match=f"schema version {found}, .* reads 2; .*start a new run"):
        log.refresh()


@pytest.fixture
def log(store: FaultyStore) -> VersionLog:
    """A log with version 0, which nobody has read."""
    return write(store, fence(0), manifest(1, version=0))


def test_an_entry_that_is_gone_is_passed_over_until_it_is_back(store: FaultyStore) -> None:
    log = write(store, fence(0), manifest(2, version=1))
    assert log.refresh() == 1
    assert list(log.unreadable) == [KEYS.entry(1)]
    with pytest.raises(CorruptManifest, match="it is gone; entries must never be deleted"):
        log.record(0)
    write(store, manifest(1, version=0))
    assert log.refresh() == 1
    assert (log.unreadable, log.record(0).sequence) == ({}, 1)


def test_a_number_far_beyond_the_log_is_no_entry(store: FaultyStore, log: VersionLog) -> None:
    store.put(KEYS.entry(10**15), b"junk")
    assert log.refresh() == 0
    assert log.next_sequence == 2


def test_strange_objects_among_the_entries_are_not_entries(store: FaultyStore, log: VersionLog) -> None:
    store.put(f"{KEYS.entries}backup.pb", b"junk")
    store.put(f"{KEYS.entries}2.pb", b"junk")
    assert log.refresh() == 0


def test_a_valid_epoch_cannot_skip_or_repeat_a_version(store: FaultyStore) -> None:
    log = write(store, fence(0), manifest(1, version=0), manifest(2, version=2))
    with pytest.raises(CorruptManifest, match="commits version 2 where 1 is due"):
        log.refresh()
    assert log.latest() == log.records[0]


def test_an_entry_copied_from_elsewhere_is_none(store: FaultyStore) -> None:
    store.put_if_absent(KEYS.entry(0), entries.encode_entry(replace(fence(0), policy_id="verifier")))
    log = write(store)
    assert log.refresh() is None
    assert "copied or renamed" in log.unreadable[KEYS.entry(0)]


def test_an_unknown_version_is_worth_asking_for_again(log: VersionLog) -> None:
    log.refresh()
    with pytest.raises(UnknownVersionError, match="version 1 of policy 'solver' is not in the log"):
        log.record(1)


def test_the_whole_manifest_is_read_back(log: VersionLog) -> None:
    log.refresh()
    found = log.manifest(0)
    assert found.tensors == TENSORS
    assert found.entry() == manifest(1, version=0)


def test_an_entry_that_changed_since_it_was_read_is_refused(store: FaultyStore, log: VersionLog) -> None:
    log.refresh()
    overwrite(store, KEYS.entry(1), entries.encode_entry(replace(manifest(1, version=0), step=9)))
    with pytest.raises(CorruptManifest, match="was changed after it was created"):
        log.manifest(0)
    store.delete(KEYS.entry(1))
    with pytest.raises(CorruptManifest, match="is gone"):
        log.manifest(0)


path = partial(added_path, size_bytes=5, root=model_root(TENSORS))


def add(store: FaultyStore, added: entries.AddedPath) -> str:
    key = path_key(KEYS, added)
    store.put_if_absent(key, entries.encode_path(added))
    return key


def test_paths_made_later_are_offered_beside_those_of_the_manifest(store: FaultyStore) -> None:
    log = write(store, *(manifest(number, version=number) for number in range(3)))
    assert log.refresh() == 2
    key = add(store, path(2, base=0))
    log.refresh()
    assert [delta.base_version for delta in log.record(2).offered_deltas] == [0]
    assert log.record(2).deltas == ()
    assert log.record(2).offered_snapshot == (PART,)
    store.delete(key)
    log.refresh()
    assert log.record(2).added == ()


def test_a_snapshot_made_later_serves_where_the_manifest_has_none(store: FaultyStore) -> None:
    second = replace(
        manifest(1, version=1), snapshot=None, deltas=(entries.DeltaRef(base_version=0, parts=(PART,)),)
    )
    log = write(store, manifest(0, version=0), second)
    add(store, path(1, base=None))
    log.refresh()
    assert log.record(1).snapshot is None
    assert log.record(1).offered_snapshot == path(1, base=None).parts


def test_a_path_that_is_damaged_or_made_for_another_log_is_passed_over(store: FaultyStore) -> None:
    log = write(store, *(manifest(number, version=number) for number in range(3)))
    flipped = add(store, path(2, base=0))
    overwrite(store, flipped, entries.encode_path(path(2, base=0))[:-1] + b"?")
    foreign = add(store, replace(path(2, base=1), model_root=b"o" * 32))
    misplaced = KEYS.merged_delta(0, 1)
    store.put_if_absent(misplaced, entries.encode_path(path(2, base=0)))
    assert log.refresh() == 2
    assert set(log.damaged_paths) == {flipped, foreign, misplaced}
    assert log.record(2).added == ()
    log.refresh()
    assert set(log.damaged_paths) == {flipped, foreign, misplaced}


def test_a_path_to_a_version_that_is_not_read_yet_waits_for_it(store: FaultyStore) -> None:
    log = write(store, manifest(0, version=0))
    add(store, path(1, base=0))
    log.refresh()
    assert log.damaged_paths == ()
    write(store, manifest(1, version=1))
    log.refresh()
    assert log.record(1).added == (path(1, base=0),)


class SideBySide(FaultyStore):
    """Answers listings, and reads of paths, only when so many are asked for at the same time."""

    def __init__(self, root: Path, *, listings: int, reads: int) -> None:
        super().__init__(root)
        self._listings = threading.Barrier(listings, timeout=TOGETHER_S)
        self._reads = threading.Barrier(reads, timeout=TOGETHER_S)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if prefix != KEYS.checkpoints:
            self._listings.wait()
        return super().list(prefix, after=after)

    def get(self, key: str) -> bytes:
        if not key.startswith(KEYS.entries):
            self._reads.wait()
        return super().get(key)


def test_a_refresh_waits_for_one_listing_and_one_path_not_for_each(tmp_path: Path) -> None:
    store = SideBySide(tmp_path / "store", listings=4, reads=3)
    write(store, *(manifest(number, version=number) for number in range(3)))
    for base in (0, 1, None):
        add(store, path(2, base=base))
    log = VersionLog(store, run_id=RUN, policy_id=POLICY)
    assert log.refresh() == 2
    assert len(log.record(2).added) == 3


def test_a_path_in_the_sequence_is_no_entry(store: FaultyStore) -> None:
    store.put_if_absent(KEYS.entry(0), entries.encode_path(path(1, base=0)))
    log = write(store)
    assert log.refresh() is None
    assert "neither a manifest nor a fence" in log.unreadable[KEYS.entry(0)]


def test_a_copy_goes_on_alone_and_reads_nothing_twice(store: FaultyStore, log: VersionLog) -> None:
    first = read_log(store)
    other = first.copy()
    write(store, manifest(2, version=1))
    store.gets.clear()
    assert other.refresh() == 1
    assert store.gets == [KEYS.entry(2)]
    assert (len(first.records), first.next_sequence, first.owner) == (1, 2, other.owner)
    assert log.refresh() == 1
    assert list(log.records) == list(other.records)


def sweep_of(number: int, *edges: Edge) -> bytes:
    """A round that collected these paths."""
    sweep = Sweep(
        number=number,
        kept_parts=frozenset(),
        paths=frozenset(edges),
        added_paths=(),
        tombstone_sha256=b"t" * 32,
        created_time_s=0,
    )
    return encode_sweep(KEYS, sweep)


def test_paths_that_were_collected_are_not_offered(store: FaultyStore) -> None:
    write(store, *(manifest(number, version=number) for number in range(3)))
    log = write(store)
    log.refresh()
    store.put_if_absent(KEYS.sweep(0), sweep_of(0, Edge(version=2, base_version=None)))
    log.refresh()
    record = log.record(2)
    assert (record.offered_snapshot, record.offered_deltas) == (None, ())
    assert (record.snapshot, record.deltas) == ((PART,), ()), "the manifest says what it said"


def test_a_sweep_of_a_version_that_is_not_read_yet_waits_for_it(store: FaultyStore) -> None:
    write(store, manifest(0, version=0))
    log = write(store)
    log.refresh()
    store.put_if_absent(KEYS.sweep(0), sweep_of(0, Edge(version=1, base_version=0)))
    log.refresh()
    write(store, manifest(0, version=0), manifest(1, version=1))
    log.refresh()
    assert log.record(1).swept == {0}


def test_a_damaged_sweep_is_told_and_passed_over(store: FaultyStore) -> None:
    write(store, manifest(0, version=0))
    store.put_if_absent(KEYS.sweep(0), b"rotten")
    log = write(store)
    log.refresh()
    assert list(log.damaged_sweeps) == [KEYS.sweep(0)]
    assert log.record(0).swept == frozenset()
