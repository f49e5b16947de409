"""What is particular to folders; the contract every store keeps is tested in tests/integration."""

import errno
import os
from pathlib import Path

import pytest

from astraflow_weights.errors import ObjectNotFound, StoreRefused, Unavailable
from astraflow_weights.store import PutResult, file


def test_readers_do_not_make_the_folder(tmp_path: Path) -> None:
    store = file.FileStore(tmp_path / "later")
    assert list(store.list("")) == []
    for read in (store.get, store.head):
        with pytest.raises(ObjectNotFound):
            read("a")
    store.delete("a")
    assert not (tmp_path / "later").exists()
    store.put_if_absent("a", b"1")
    assert file.FileStore(tmp_path / "later").get("a") == b"1"


def test_a_folder_that_cannot_be_made_is_refused_at_the_first_put(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = file.FileStore(tmp_path / "file" / "store")
    for put in (store.put_if_absent, store.put):
        with pytest.raises(StoreRefused, match="cannot be made: Not a directory; check the folder's owner"):
            put("a", b"1")


def test_unfinished_writes_are_not_objects(tmp_path: Path) -> None:
    store = file.FileStore(tmp_path)
    store.put("hint", b"1")
    store.delete("hint")
    (tmp_path / ".scratch" / "torn").write_bytes(b"half")
    assert list(store.list("")) == []
    with pytest.raises(ValueError, match="not allowed"):
        store.get(".scratch/torn")


def test_nothing_is_left_behind_by_winners_or_losers(tmp_path: Path) -> None:
    store = file.FileStore(tmp_path)
    assert store.put_if_absent("k", b"1") is PutResult.CREATED
    assert store.put_if_absent("k", b"2") is PutResult.EXISTS
    store.put("hint", b"3")
    assert list((tmp_path / ".scratch").iterdir()) == []


def test_objects_can_be_read_by_other_users(tmp_path: Path) -> None:
    file.FileStore(tmp_path).put_if_absent("k", b"1")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_folder_is_not_an_object(tmp_path: Path) -> None:
    store = file.FileStore(tmp_path)
    store.put_if_absent("a/b", b"1")
    for read in (store.get, store.head):
        with pytest.raises(ObjectNotFound):
            read("a")


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.ENOSPC, Unavailable, "free space"),
        (errno.EIO, Unavailable, "mount"),
        (errno.EROFS, StoreRefused, "mode"),
        (errno.EPERM, StoreRefused, "hard links, or an s3:// store"),
    ],
)
def test_faults_of_the_file_system_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], remedy: str
) -> None:
    store = file.FileStore(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(kind, match=remedy):
        store.put_if_absent("k", b"1")
    monkeypatch.undo()
    assert list(store.list("")) == []
