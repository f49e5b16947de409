"""Episodes on disk outlive the process that wrote them, and a damaged end never hides what lies before it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.rollout.v1 import trajectory_pb2
from astraflow_raas.push.spool_files import SpoolFiles


def episode(name: str, *, padding: int = 0) -> trajectory_pb2.Episode:
    return trajectory_pb2.Episode(run_id="x" * padding, episode_id=name)


def names(files: SpoolFiles) -> list[str]:
    return [found.episode_id for _, found in files.recover()]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writes beyond this size of a file fail, as on a full disk; Python ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_episodes_are_found_in_their_order_and_files_go_with_their_last_one(tmp_path: Path) -> None:
    files, listed = SpoolFiles(tmp_path / "spool"), [f"e{number}" for number in range(300)]
    kept = [files.add(episode(name)) for name in listed]
    assert len(list((tmp_path / "spool").iterdir())) == 2
    assert names(SpoolFiles(tmp_path / "spool")) == listed
    for number in kept[:256]:
        files.release(number)
    assert names(SpoolFiles(tmp_path / "spool")) == listed[256:]
    for number in kept[256:]:
        files.release(number)
    assert list((tmp_path / "spool").iterdir()) == []
    files.add(episode("later"))
    assert names(SpoolFiles(tmp_path / "spool")) == ["later"]


def test_recovered_episodes_are_released_like_new_ones(tmp_path: Path) -> None:
    SpoolFiles(tmp_path).add(episode("old"))
    files = SpoolFiles(tmp_path)
    ((number, _),) = files.recover()
    assert files.add(episode("new")) != number
    files.release(number)
    assert names(SpoolFiles(tmp_path)) == ["new"]


@given(cut=st.integers(0, 200), flipped=st.integers(0, 400))
def test_a_torn_or_damaged_end_costs_only_itself(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flipped: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    files = SpoolFiles(folder)
    for number in range(3):
        files.add(episode(f"e{number}", padding=100))
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    size = len(data) // 3
    if flipped < len(data):
        data[flipped] ^= 1
    path.write_bytes(data[: len(data) - cut])
    whole = min(flipped // size if flipped < len(data) else 3, (len(data) - cut) // size)
    assert names(SpoolFiles(folder)) == [f"e{number}" for number in range(whole)]


def test_a_full_disk_is_said_and_hides_nothing_written_before_or_after(tmp_path: Path) -> None:
    files = SpoolFiles(tmp_path)
    files.add(episode("before", padding=100))
    with files_of_at_most(300), pytest.raises(OSError, match=r"bytes could be written|too large"):
        files.add(episode("lost", padding=1000))
    files.add(episode("after"))
    assert names(SpoolFiles(tmp_path)) == ["before", "after"]


def test_an_empty_leftover_is_removed(tmp_path: Path) -> None:
    with files_of_at_most(50), pytest.raises(OSError, match="bytes could be written"):
        SpoolFiles(tmp_path).add(episode("lost", padding=1000))
    assert list(tmp_path.iterdir()) == []
