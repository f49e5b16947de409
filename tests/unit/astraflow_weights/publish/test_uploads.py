"""What is uploaded is stored under a name that no collector may delete."""

import threading
from collections.abc import Iterator

from astraflow_weights.codec import Schema, decode_snapshot, digest, encode_snapshot
from astraflow_weights.publish.uploads import Uploads
from support import published_models, weight_models
from support.scripted_batches import PATIENCE_S

MODEL = weight_models.make_model()
SCHEMA = Schema.of_model(MODEL)
PARTS = encode_snapshot(MODEL, part_bytes=2000)


def uploads_of(store: weight_models.FaultyStore) -> Uploads:
    """Uploads that know the tombstones."""
    uploads = Uploads(store, keys=weight_models.KEYS, threads=2)
    uploads.read_tombstones()
    return uploads


def test_a_name_in_a_tombstone_is_never_referenced_again(store: weight_models.FaultyStore) -> None:
    first = uploads_of(store).upload_parts(PARTS)
    published_models.bury(store, 0, first[0].sha256)
    second = uploads_of(store).upload_parts(PARTS)
    assert second[0].sha256 != first[0].sha256
    assert second[1:] == first[1:], "only what is in a tombstone gets another name"
    published_models.bury(store, 1, second[0].sha256)
    third = uploads_of(store).upload_parts(PARTS)
    assert len({refs[0].sha256 for refs in (first, second, third)}) == 3
    store.delete(first[0].key)
    store.delete(second[0].key)
    assert weight_models.same_model(
        decode_snapshot([store.get(ref.key) for ref in third], schema=SCHEMA), MODEL
    )


def test_the_same_content_gets_the_same_fresh_name_again(store: weight_models.FaultyStore) -> None:
    published_models.bury(store, 0, *map(digest.sha256, PARTS))
    assert uploads_of(store).upload_parts(PARTS) == uploads_of(store).upload_parts(PARTS)


def test_beside_a_tombstone_that_cannot_be_read_every_name_is_fresh(store: weight_models.FaultyStore) -> None:
    plain = uploads_of(store).upload_parts(PARTS)
    published_models.bury(store, 0, plain[0].sha256)
    weight_models.overwrite(store, weight_models.KEYS.tombstone(0), b"rotten")
    fresh = uploads_of(store).upload_parts(PARTS)
    assert {ref.sha256 for ref in fresh}.isdisjoint(ref.sha256 for ref in plain)
    assert weight_models.same_model(
        decode_snapshot([store.get(ref.key) for ref in fresh], schema=SCHEMA), MODEL
    )


def test_a_part_is_sent_while_the_next_one_is_made(store: weight_models.FaultyStore) -> None:
    sent = threading.Event()
    store.before_put = lambda key, data: sent.set()

    def made() -> Iterator[bytes]:
        yield PARTS[0]
        assert sent.wait(PATIENCE_S), "the first part waits for the second"
        yield from PARTS[1:]

    assert len(uploads_of(store).upload_parts(made())) == len(PARTS)


def test_a_tombstone_that_was_removed_is_forgotten(store: weight_models.FaultyStore) -> None:
    uploads = Uploads(store, keys=weight_models.KEYS, threads=2)
    published_models.bury(store, 0, b"x" * 32)
    assert uploads.read_tombstones() == {b"x" * 32}
    store.delete(weight_models.KEYS.tombstone(0))
    assert uploads.read_tombstones() == frozenset()
