"""Keys sort like their numbers and cannot climb out of their folder."""

import pytest

from astraflow_weights.store.layout import PolicyKeys, check_file_name, check_id, check_key


def test_keys_of_a_policy() -> None:
    keys = PolicyKeys("run-1", "solver")
    assert keys.merged_delta(8, 16) == f"run-1/solver/merged/{8:020d}-{16:020d}.pb"
    assert keys.snapshot(9) == f"run-1/solver/snapshots/{9:020d}.pb"
    assert keys.entry(7) == "run-1/solver/seq/00000000000000000007.pb"
    assert keys.part("ab") == "run-1/solver/parts/ab.afwd"
    assert keys.asset("ab") == "run-1/solver/assets/ab"
    assert keys.latest == "run-1/solver/latest"


def test_entries_sort_like_their_numbers() -> None:
    keys = PolicyKeys("r", "p")
    numbers = [0, 1, 9, 10, 99, 2**63]
    assert sorted(map(keys.entry, numbers)) == [keys.entry(number) for number in numbers]


@pytest.mark.parametrize("value", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "ä", "x" * 129, "-x"])
def test_ids_that_could_leave_their_folder_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="cannot be used in object keys"):
        check_id(value, what="run id")


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", ".scratch/x", "a\0", "a/b\n", "x" * 1025]
)
def test_keys_that_could_leave_the_store_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        check_key(key)


@pytest.mark.parametrize("name", ["", "..", ".bashrc", "a/b", "model.safetensors"])
def test_asset_names_that_could_replace_something_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        check_file_name(name)
