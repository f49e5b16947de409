"""A table says all digests, or those that its key manifest does not have; either way the same ones come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.weights.v1 import manifest_pb2
from astraflow_weights.versions.references.digest_table import (
    DigestTable,
    KeyRef,
    KeyTable,
    read_table,
    table_message,
)

REF = KeyRef(sequence=3, sha256=b"k" * 32)
digest = st.integers(0, 3).map(lambda value: bytes([value]) * 16)


def key_of(digests: list[bytes]) -> KeyTable:
    return KeyTable(ref=REF, schema_sha256=b"s" * 32, digests=tuple(digests))


@given(st.lists(st.tuples(digest, digest), min_size=1, max_size=40), st.booleans())
def test_digests_come_back(pairs: list[tuple[bytes, bytes]], has_key: bool) -> None:
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    table = DigestTable.of(ours, key=key_of(theirs) if has_key else None)
    message = manifest_pb2.DigestTable.FromString(table_message(table).SerializeToString())
    assert read_table(message) == table
    key_digests = None if table.key is None else theirs
    assert table.digests_of(len(ours), key_digests=key_digests) == ours


def test_tensors_that_stayed_equal_cost_nothing() -> None:
    digests = [number.to_bytes(16, "big") for number in range(10_000)]
    changed = list(digests)
    changed[5000] = b"x" * 16
    table = DigestTable.of(changed, key=key_of(digests))
    assert len(table_message(table).SerializeToString()) < 16 + 50


def test_a_table_with_most_digests_changed_refers_to_nothing() -> None:
    digests = [b"a" * 16] * 5
    assert DigestTable.of([b"b" * 16] * 3 + digests[3:], key=key_of(digests)).key is None
    assert DigestTable.of([b"b" * 16] * 2 + digests[2:], key=key_of(digests)).key == REF


@pytest.mark.parametrize(
    ("table", "num_tensors", "key", "message"),
    [
        (DigestTable(key=None, numbers=(), digests=(b"a" * 16,)), 2, None, "1 digests of 2 tensors"),
        (DigestTable(key=REF, numbers=(2,), digests=(b"a" * 16,)), 2, [b"b" * 16] * 2, "tensor 2 of 2"),
        (DigestTable(key=REF, numbers=(), digests=()), 3, [b"b" * 16] * 2, "2 digests of 3"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    table: DigestTable, num_tensors: int, key: list[bytes] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        table.digests_of(num_tensors, key_digests=key)
