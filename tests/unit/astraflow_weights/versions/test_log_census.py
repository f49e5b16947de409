"""The census of a store finds what a reader must never see; the tests of killed writers rely on that."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from astraflow_weights.codec.digest import model_root
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import ManifestEntry, decode_entry, encode_entry
from support import published_models, store_census
from support.weight_models import KEYS, POLICY, RUN, FaultyStore, make_model, overwrite, trained

Damage = Callable[[FaultyStore, ManifestEntry], None]


@pytest.fixture
def store(store: FaultyStore) -> FaultyStore:
    """Versions 0 to 2 of two writers, and a part that no manifest names."""
    model = make_model()
    for epoch in (1, 2):
        writer = published_models.open_writer(store, epoch=epoch)
        publisher = published_models.ModelPublisher(writer, base=None if epoch == 1 else model)
        for step in (0, 1) if epoch == 1 else (2,):
            model = trained(model, step)
            publisher.publish(model, step=step)
    writer.uploads.upload_parts([b"of an upload that was killed"])
    return store


def manifest_of(store: FaultyStore, sequence: int) -> ManifestEntry:
    """The manifest under a number."""
    entry = decode_entry(store.get(KEYS.entry(sequence)))
    assert isinstance(entry, ManifestEntry)
    return entry


def test_a_sound_log_is_counted(store: FaultyStore) -> None:
    census = store_census.take(store, run_id=RUN, policy_id=POLICY)
    assert (census.steps, census.epochs, census.num_ignored) == ([0, 1, 2], [1, 1, 2], 0)
    assert (len(census.entries), census.num_stray_parts) == (5, 1)


def lose_a_part(store: FaultyStore, manifest: ManifestEntry) -> None:
    store.delete(manifest.deltas[0].parts[0].key)


def damage_a_part(store: FaultyStore, manifest: ManifestEntry) -> None:
    overwrite(store, manifest.deltas[0].parts[0].key, b"something else")


def claim_another_root(store: FaultyStore, manifest: ManifestEntry) -> None:
    log = VersionLog(store, run_id=RUN, policy_id=POLICY)
    log.refresh()
    whole = log.manifest(manifest.version)
    tensors = (replace(whole.tensors[0], digest=bytes(16)), *whole.tensors[1:])
    entry = replace(whole, tensors=tensors, model_root=model_root(tensors)).entry()
    overwrite(store, KEYS.entry(manifest.sequence), encode_entry(entry))


def leave_a_gap(store: FaultyStore, _: ManifestEntry) -> None:
    store.delete(KEYS.entry(0))


def write_as_another(store: FaultyStore, manifest: ManifestEntry) -> None:
    entry = replace(manifest, writer_nonce=bytes(16))
    overwrite(store, KEYS.entry(manifest.sequence), encode_entry(entry))


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lose_a_part, "version 1 is torn: .* is missing"),
        (damage_a_part, "version 1 is torn: .* is damaged"),
        (claim_another_root, "rebuilt to another model"),
        (leave_a_gap, "is gone"),
        (write_as_another, "2 writers made versions under epoch 1"),
    ],
)
def test_what_no_reader_may_see_is_found(store: FaultyStore, damage: Damage, finding: str) -> None:
    damage(store, manifest_of(store, 2))
    with pytest.raises(AssertionError, match=finding):
        store_census.take(store, run_id=RUN, policy_id=POLICY)
