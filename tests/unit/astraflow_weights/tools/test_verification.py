"""A version is called whole only when every byte of every path to it is; else its fault is named."""

from pathlib import Path

import pytest

from astraflow_weights import codec
from astraflow_weights.settings import PublishSettings
from astraflow_weights.tools.verification import Verification, verify_version
from astraflow_weights.versions import fetch, inspection, manifest
from support.published_models import PublishedModels, commit_parts, open_writer, read_log
from support.weight_models import KEYS, POLICY, RUN, FaultyStore, flip, make_model

LAST = 5


@pytest.fixture
def store(store: FaultyStore, tmp_path: Path) -> FaultyStore:
    """Six versions with an asset; 0, 2 and 4 offer snapshots, all but 0 a delta."""
    asset = tmp_path / "config.json"
    asset.write_text("{}")
    settings = PublishSettings(snapshot_every_versions=2, snapshot_chain_ratio=100)
    PublishedModels(store, settings=settings, assets=[asset]).publish_up_to(LAST)
    return store


def verified(store: FaultyStore, version: int) -> Verification:
    return verify_version(store, read_log(store), version=version, threads=2)


@pytest.mark.parametrize("version", range(LAST + 1))
def test_what_was_published_is_whole(store: FaultyStore, version: int) -> None:
    found = verified(store, version)
    assert found.faults == ()
    assert found.paths == (version > 0) + (version % 2 == 0)
    assert found.objects >= found.paths + 1
    assert found.tensors == len(make_model())


@pytest.mark.parametrize("path", ["snapshot", "delta"])
@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_a_damaged_part_is_named_beside_another_path(store: FaultyStore, path: str, damage: str) -> None:
    record = read_log(store).record(4)
    key = ((record.snapshot or ()) if path == "snapshot" else record.deltas[0].parts)[0].key
    flip(store, key) if damage == "flip" else store.delete(key)
    (fault,) = verified(store, 4).faults
    assert (fault.version, fault.part) == (4, key)


def test_a_damaged_asset_is_named(store: FaultyStore) -> None:
    (asset,) = read_log(store).manifest(3).assets
    flip(store, asset.blob.key)
    assert [fault.part for fault in verified(store, 3).faults] == [asset.blob.key]


def test_the_older_version_that_a_path_breaks_at_is_named(store: FaultyStore) -> None:
    snapshot = read_log(store).record(4).snapshot
    assert snapshot is not None
    for part in snapshot:
        store.delete(part.key)
    (fault,) = verified(store, 5).faults
    assert fault.version == 4
    assert snapshot[0].key in fault.problem


def test_parts_that_are_intact_but_lead_elsewhere_are_told_by_tensor(store: FaultyStore) -> None:
    log = read_log(store)
    newest = inspection.build_version(store, log, target=LAST, threads=2)
    wanted = newest | {"model.norm": newest["model.norm"] + 1}
    reached = newest | {"model.norm": newest["model.norm"] + 2}
    commit_parts(open_writer(store, epoch=2), wanted, delta=codec.encode_delta(newest, reached))
    (fault,) = verified(store, LAST + 1).faults
    assert (fault.version, fault.part, fault.tensor) == (LAST + 1, "", "model.norm")


def test_an_entry_of_the_log_that_cannot_be_read_is_told(store: FaultyStore) -> None:
    log = read_log(store)
    key = KEYS.entry(log.record(3).sequence)
    flip(store, key)
    for reader in (log, read_log(store)):
        (fault,) = verify_version(store, reader, version=3, threads=2).faults
        assert (fault.version, fault.part) == (3, key)
        assert "its seal does not match" in fault.problem


def test_paths_added_later_are_rebuilt_and_checked_too(store: FaultyStore) -> None:
    record = read_log(store).record(3)
    chain = [
        [fetch.fetch_part(store, part) for part in read_log(store).record(version).deltas[0].parts]
        for version in (2, 3)
    ]
    uploads = open_writer(store, epoch=2).uploads
    parts = uploads.upload_parts(codec.merge_deltas(chain, schema=read_log(store).manifest(3).schema))
    path = manifest.AddedPath(
        run_id=RUN, policy_id=POLICY, version=3, base_version=1, model_root=record.model_root, parts=parts
    )
    store.put_if_absent(KEYS.merged_delta(1, 3), manifest.encode_path(path))
    assert (verified(store, 3).paths, verified(store, 3).faults) == (2, ())
    flip(store, KEYS.merged_delta(1, 3))
    assert [fault.part for fault in verified(store, 3).faults] == [KEYS.merged_delta(1, 3)]
    assert verified(store, 4).faults == ()
