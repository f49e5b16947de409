"""What a log entry refers to is fetched once, compared with its sha256, and must make the model root."""

from dataclasses import replace

import pytest

from astraflow_weights.errors import CorruptManifest
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import ManifestEntry, decode_entry, encode_entry
from support import published_models, weight_models
from support.weight_models import KEYS, POLICY, RUN, FaultyStore, overwrite


@pytest.fixture
def log(store: FaultyStore) -> VersionLog:
    """Versions 0 to 3, each with one tensor changed: versions 1 to 3 refer to version 0."""
    publisher = published_models.ModelPublisher(published_models.open_writer(store), base=None)
    model = weight_models.make_model()
    for step in range(4):
        publisher.publish(model, step=step)
        model = weight_models.copied(model)
        model["model.norm"][step] += 1
    log = VersionLog(store, run_id=RUN, policy_id=POLICY)
    log.refresh()
    return log


def entry_of(store: FaultyStore, log: VersionLog, version: int) -> ManifestEntry:
    entry = decode_entry(store.get(KEYS.entry(log.record(version).sequence)))
    assert isinstance(entry, ManifestEntry)
    return entry


def test_a_version_is_whole_by_its_entry_one_key_manifest_and_the_schema(
    store: FaultyStore, log: VersionLog
) -> None:
    entry = entry_of(store, log, 3)
    assert (entry.table.key is not None, len(entry.table.digests)) == (True, 1)
    store.gets.clear()
    manifest = log.manifest(3)
    schema_key = KEYS.schema(manifest.schema.digest.hex())
    keys = [KEYS.entry(log.record(version).sequence) for version in (3, 0)]
    assert sorted(store.gets) == sorted([*keys, schema_key])
    store.gets.clear()
    assert log.manifest(2).schema == manifest.schema
    assert store.gets == [KEYS.entry(log.record(2).sequence)], "what is referred to is fetched once"


def test_a_new_writer_begins_with_a_key_manifest(store: FaultyStore, log: VersionLog) -> None:
    model = weight_models.make_model()
    for step in range(3):
        model["model.norm"][step] += 1
    writer = published_models.open_writer(store, epoch=2)
    publisher = published_models.ModelPublisher(writer, base=model)
    model = weight_models.copied(model)
    model["model.norm"][9] += 1
    publisher.publish(model, step=9)
    assert entry_of(store, writer.log, 4).table.key is None


def rot_the_schema(store: FaultyStore, log: VersionLog) -> None:
    (info,) = store.list(KEYS.schemas)
    overwrite(store, info.key, b"rotten")


def lose_the_schema(store: FaultyStore, log: VersionLog) -> None:
    (info,) = store.list(KEYS.schemas)
    store.delete(info.key)


def rot_the_key_manifest(store: FaultyStore, log: VersionLog) -> None:
    overwrite(store, KEYS.entry(log.record(0).sequence), encode_entry(entry_of(store, log, 1)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rot_the_schema, "schemas/.* was changed after it was created"),
        (lose_the_schema, "schemas/.* is gone"),
        (rot_the_key_manifest, "seq/.* is referred to: log entry 1 of .* says it is entry 2"),
    ],
)
def test_damage_to_what_is_referred_to_is_named(
    store: FaultyStore, log: VersionLog, damage: object, message: str
) -> None:
    damage(store, log)  # type: ignore[operator]
    with pytest.raises(CorruptManifest, match=message):
        log.manifest(3)


def test_digests_that_do_not_make_the_root_are_refused(store: FaultyStore, log: VersionLog) -> None:
    """Sealed by whoever wrote it, so nothing but the root can tell."""
    entry = entry_of(store, log, 3)
    table = replace(entry.table, digests=(bytes(16),))
    later = replace(entry, table=table, sequence=log.next_sequence, version=4, parent_version=3)
    store.put(KEYS.entry(later.sequence), encode_entry(later))
    log.refresh()
    with pytest.raises(CorruptManifest, match="root does not belong to the tensors"):
        log.manifest(4)
