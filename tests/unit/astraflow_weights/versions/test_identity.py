"""The store remembers, once, which run it belongs to."""

import pytest

from astraflow.errors import ConflictError, IncompatibleError
from astraflow_weights.versions.identity import read_identity, remember_identity
from support.weight_models import KEYS, FaultyStore

OURS, OTHER = "a" * 32, "b" * 32


def test_a_new_store_belongs_to_nobody_and_then_to_the_first(store: FaultyStore) -> None:
    assert read_identity(store, KEYS) == ""
    for _ in range(2):
        remember_identity(store, KEYS, OURS)
    assert read_identity(store, KEYS) == OURS


def test_another_run_is_refused_by_name(store: FaultyStore) -> None:
    remember_identity(store, KEYS, OURS)
    with pytest.raises(
        ConflictError, match=f"identity {OURS}, this one is {OTHER}; give this run another store"
    ):
        remember_identity(store, KEYS, OTHER)


def test_what_is_no_identity_is_never_taken_for_one(store: FaultyStore) -> None:
    store.put_if_absent(KEYS.identity, b"\xffhello")
    with pytest.raises(IncompatibleError, match="instead of 32 hex digits"):
        read_identity(store, KEYS)
