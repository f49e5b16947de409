"""Addresses open the right store, and one that would let two trainers overwrite each other is refused."""

from pathlib import Path

import pytest

from astraflow_weights.errors import StoreRefused
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import PutResult, file, open_store, probing
from astraflow_weights.store.probing import probe_create_only
from support.weight_models import FaultyStore


def test_a_file_address_opens_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    store = open_store(folder.as_uri())
    store.put_if_absent("a/b", b"x")
    assert (folder / "a" / "b").read_bytes() == b"x"
    assert store.uri == folder.as_uri()


def test_an_s3_address_opens_its_prefix_without_asking_the_store() -> None:
    store = open_store("s3://bucket/some/prefix/", settings=StoreSettings(endpoint_url="http://127.0.0.1:9"))
    assert store.uri == "s3://bucket/some/prefix"


@pytest.mark.parametrize(
    "uri",
    ["", "/srv/weights", "file://", "file://host/path", "s3://", "s3:///prefix", "gs://bucket", "http://x/y"],
)
def test_other_addresses_are_refused_with_the_forms_that_work(uri: str) -> None:
    with pytest.raises(StoreRefused, match=r"use file:///path or s3://bucket/prefix"):
        open_store(uri)


def test_a_store_that_honours_create_only_passes_and_keeps_nothing(tmp_path: Path) -> None:
    store = file.FileStore(tmp_path)
    probe_create_only(store, remember=False)
    assert list(store.list("")) == []


def test_what_many_writers_showed_is_remembered_in_the_store(tmp_path: Path) -> None:
    store = file.FileStore(tmp_path)
    probe_create_only(store)
    assert [item.key for item in store.list("")] == [probing.PASSED_KEY]
    crowded = CrowdedStore(tmp_path)
    probe_create_only(crowded)
    assert crowded.large_puts == 0


class CrowdedStore(FaultyStore):
    """Honours the condition for one writer after another; of large bodies that arrive together it takes several."""

    large_puts = 0

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        if len(data) < probing.BODY_BYTES:
            return super().put_if_absent(key, data)
        type(self).large_puts += 1
        self.put(key, data)
        return PutResult.CREATED if data[0] % 2 else PutResult.EXISTS


def test_a_store_that_lets_several_of_many_writers_win_is_refused(tmp_path: Path) -> None:
    store = CrowdedStore(tmp_path)
    with pytest.raises(
        StoreRefused, match=r"when 32 write .* told 16 that they created it.*for many writers too"
    ):
        probe_create_only(store)
    assert list(store.list("")) == []


class Overwriting(FaultyStore):
    """Ignores the condition and claims success, as some S3-compatible stores do."""

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        self.put(key, data)
        return PutResult.CREATED


class OverwritingInSecret(Overwriting):
    """Answers as it should, and overwrites all the same."""

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        existed = any(self.list(key))
        super().put_if_absent(key, data)
        return PutResult.EXISTS if existed else PutResult.CREATED


@pytest.mark.parametrize("kind", [Overwriting, OverwritingInSecret])
def test_a_store_that_ignores_create_only_is_refused(tmp_path: Path, kind: type[FaultyStore]) -> None:
    store = kind(tmp_path)
    with pytest.raises(
        StoreRefused, match="two trainers could overwrite each other; use a store that supports"
    ):
        probe_create_only(store)
    assert list(store.list("")) == []
