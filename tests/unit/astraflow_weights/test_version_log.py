"""Readers agree on versions: epochs never fall along the sequence, and contradictions are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from astraflow.errors import UnknownVersionError
from astraflow_weights.digest import model_root
from astraflow_weights.errors import CorruptManifest
from astraflow_weights.layout import PolicyKeys
from astraflow_weights.manifest import Entry, Fence, Manifest, PartRef, encode_entry
from astraflow_weights.store_file import FileStore
from astraflow_weights.tensor_hash import tensor_digests
from astraflow_weights.version_log import VersionLog
from support.weight_models import POLICY, RUN, make_model, overwrite

KEYS = PolicyKeys(RUN, POLICY)
TENSORS = tensor_digests(make_model())
PART = PartRef(key=KEYS.part("ab"), size_bytes=10, sha256=b"s" * 32)


def fence(sequence: int, *, epoch: int) -> Fence:
    return Fence(
        run_id=RUN, policy_id=POLICY, sequence=sequence, epoch=epoch, nonce=nonce(epoch), previous_epoch=None
    )


def nonce(epoch: int) -> bytes:
    return epoch.to_bytes(16, "big")


def manifest(sequence: int, *, epoch: int, version: int) -> Manifest:
    return Manifest(
        run_id=RUN,
        policy_id=POLICY,
        version=version,
        sequence=sequence,
        writer_epoch=epoch,
        writer_nonce=nonce(epoch),
        step=version,
        parent_version=version - 1 if version else None,
        snapshot=(PART,),
        deltas=(),
        tensors=TENSORS,
        model_root=model_root(TENSORS),
        num_elements=sum(tensor.spec.num_elements for tensor in TENSORS),
    )


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def write(store: FileStore, *entries: Entry) -> VersionLog:
    for entry in entries:
        store.put_if_absent(KEYS.entry(entry.sequence), encode_entry(entry))
    return VersionLog(store, run_id=RUN, policy_id=POLICY)


def test_an_empty_log_has_no_version(store: FileStore) -> None:
    log = write(store)
    assert log.refresh() is None
    assert log.latest() is None
    assert log.owner is None


def test_versions_are_counted_over_manifests_only(store: FileStore) -> None:
    log = write(
        store,
        fence(0, epoch=1),
        manifest(1, epoch=1, version=0),
        manifest(2, epoch=1, version=1),
        fence(3, epoch=2),
        manifest(4, epoch=2, version=2),
    )
    assert log.refresh() == 2
    assert [record.sequence for record in log.records] == [1, 2, 4]
    assert log.next_sequence == 5


def test_a_zombie_wastes_a_number_and_wins_none(store: FileStore) -> None:
    log = write(
        store,
        fence(0, epoch=1),
        manifest(1, epoch=1, version=0),
        fence(2, epoch=2),
        manifest(3, epoch=1, version=1),
        fence(4, epoch=1),
        manifest(5, epoch=2, version=1),
    )
    assert log.refresh() == 1
    assert [(record.sequence, record.writer_epoch) for record in log.records] == [(1, 1), (5, 2)]
    assert log.num_ignored == 2
    assert log.owner is not None
    assert (log.owner.epoch, log.owner.nonce) == (2, nonce(2))


def test_a_manifest_that_arrived_before_the_fence_counts(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(1, epoch=1, version=0), fence(2, epoch=5))
    assert log.refresh() == 0


def test_refreshing_reads_only_what_is_new(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(1, epoch=1, version=0))
    assert log.refresh() == 0
    assert log.refresh() == 0
    write(store, manifest(2, epoch=1, version=1))
    assert log.refresh() == 1


def test_entries_behind_a_gap_wait_until_it_is_filled(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(2, epoch=1, version=1))
    assert log.refresh() is None
    write(store, manifest(1, epoch=1, version=0))
    assert log.refresh() == 1


def test_strange_objects_among_the_entries_are_not_entries(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(1, epoch=1, version=0))
    store.put(f"{KEYS.entries}backup.pb", b"junk")
    store.put(f"{KEYS.entries}2.pb", b"junk")
    assert log.refresh() == 0


def test_a_valid_epoch_cannot_skip_or_repeat_a_version(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(1, epoch=1, version=0), manifest(2, epoch=1, version=2))
    with pytest.raises(CorruptManifest, match="commits version 2 where 1 is due"):
        log.refresh()
    assert log.latest() == log.records[0]


def test_an_entry_copied_from_elsewhere_is_refused(store: FileStore) -> None:
    store.put_if_absent(KEYS.entry(0), encode_entry(replace(fence(0, epoch=1), policy_id="verifier")))
    with pytest.raises(CorruptManifest, match="copied or renamed"):
        write(store).refresh()


def test_an_unknown_version_is_worth_asking_for_again(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(1, epoch=1, version=0))
    log.refresh()
    with pytest.raises(UnknownVersionError, match="version 1 of policy 'solver' is not in the log"):
        log.record(1)


def test_the_whole_manifest_is_read_back(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(1, epoch=1, version=0))
    log.refresh()
    assert log.manifest(0) == manifest(1, epoch=1, version=0)


def test_an_entry_that_changed_since_it_was_read_is_refused(store: FileStore) -> None:
    log = write(store, fence(0, epoch=1), manifest(1, epoch=1, version=0))
    log.refresh()
    overwrite(store, KEYS.entry(1), encode_entry(replace(manifest(1, epoch=1, version=0), step=9)))
    with pytest.raises(CorruptManifest, match="was changed after it was created"):
        log.manifest(0)
    store.delete(KEYS.entry(1))
    with pytest.raises(CorruptManifest, match="is gone"):
        log.manifest(0)
