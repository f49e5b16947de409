"""What is particular to folders; the contract every store keeps is tested in tests/integration."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from astraflow_weights.errors import ObjectNotFound, StoreMissing, StoreRefused, Unavailable
from astraflow_weights.store import PutResult, file
from support.mount_points import unmounted


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


def test_a_store_that_another_thread_makes_meanwhile_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read_bytes = file.FileStore(tmp_path / "store"), Path.read_bytes

    def find_none_and_be_overtaken(path: Path) -> bytes:
        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        store.put("theirs", b"2")
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", find_none_and_be_overtaken)
    assert store.put_if_absent("ours", b"1") is PutResult.CREATED
    assert (store.get("ours"), store.get("theirs")) == (b"1", b"2")


def test_many_who_see_a_store_for_the_first_time_remember_it_side_by_side(tmp_path: Path) -> None:
    file.FileStore(tmp_path / "store").put("a", b"1")
    for number in range(20):
        known, at_once = tmp_path / f"known-{number}", Barrier(8)

        def first_sight(known: Path = known, at_once: Barrier = at_once) -> bytes:
            store = file.FileStore(tmp_path / "store", known=known)
            at_once.wait()
            return store.get("a")

        with ThreadPoolExecutor(8) as pool:
            assert [done.result() for done in [pool.submit(first_sight) for _ in range(8)]] == [b"1"] * 8
        assert [
            path.name for path in tmp_path.glob("known-*") if path.name.startswith(f"{known.name}.")
        ] == []


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


@pytest.mark.parametrize("mount_point", [False, True], ids=["gone", "empty mount point"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_store_that_was_used_is_never_made_again(
    tmp_path: Path, *, mount_point: bool, restarted: bool
) -> None:
    root, away, known = tmp_path / "mount" / "store", tmp_path / "away", tmp_path / "known"
    store = file.FileStore(root, known=known)
    store.put_if_absent("a/b", b"1")
    root.rename(away)
    if mount_point:
        root.mkdir()
    if restarted:
        store = file.FileStore(root, known=known)
    for call in (
        *(lambda: store.put_if_absent("k", b"2"), lambda: store.put("k", b"2")),
        *(lambda: store.get("a/b"), lambda: store.head("a/b"), lambda: list(store.list(""))),
    ):
        with pytest.raises(
            StoreMissing, match=r"there is no store: it is not mounted.* delete .*/known to begin"
        ):
            call()
    assert root.exists() == mount_point
    assert not mount_point or list(root.iterdir()) == []
    if mount_point:
        root.rmdir()
    away.rename(root)
    assert store.put_if_absent("a/b", b"2") is PutResult.EXISTS
    assert [item.key for item in store.list("")] == ["a/b"]


@pytest.mark.parametrize("read", [lambda store: store.get("a/b"), lambda store: list(store.list(""))])
def test_a_store_that_was_only_read_is_missed_as_well(
    tmp_path: Path, read: Callable[[file.FileStore], object]
) -> None:
    root = tmp_path / "store"
    file.FileStore(root).put_if_absent("a/b", b"1")
    reader = file.FileStore(root)
    read(reader)
    bring_back = unmounted(root)
    with pytest.raises(StoreMissing, match="there is no store: it is not mounted"):
        reader.get("a/c")
    bring_back()
    assert reader.get("a/b") == b"1"


def test_another_store_in_its_place_is_not_written_to(tmp_path: Path) -> None:
    store, other = file.FileStore(tmp_path / "store"), file.FileStore(tmp_path / "other")
    store.put("k", b"1")
    other.put("k", b"2")
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "other").rename(tmp_path / "store")
    with pytest.raises(StoreMissing, match="another store is there"):
        store.put("k", b"3")
    assert (tmp_path / "store" / "k").read_bytes() == b"2"


def test_a_store_that_goes_between_the_check_and_the_write_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = file.FileStore(tmp_path / "store")
    store.put("k", b"1")
    written = file.write_synced

    def unmounted(path: Path, *chunks: bytes) -> None:
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").mkdir()
        written(path, *chunks)

    monkeypatch.setattr(file, "write_synced", unmounted)
    with pytest.raises(StoreMissing):
        store.put_if_absent("run/policy/k", b"2")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_folder_of_objects_from_before_identities_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    store = file.FileStore(tmp_path)
    assert store.put_if_absent("a", b"2") is PutResult.EXISTS
    assert store.get("a") == b"1"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_store_that_has_worked_is_waited_for_when_it_turns_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = file.FileStore(tmp_path)
    store.put("k", b"1")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(Unavailable, match="owner, mode"):
        store.put_if_absent("l", b"1")
    monkeypatch.undo()
    assert store.put_if_absent("l", b"1") is PutResult.CREATED
