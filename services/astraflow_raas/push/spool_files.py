"""Finished episodes on this machine's disk, so that they outlive the node's process.

Invariant: an episode is in a file from before its first byte is sent until it is released; a write that was
cut short never hides what lies before it; a file goes when its last episode is released. Nothing is synced:
the files survive the death of the process, while the death of the machine is what leases are for. Called by
`pushing`, from one task at a time.

A file holds records of `length u32 · crc32 u32 · Episode`, little-endian.
"""

import os
import struct
import zlib
from collections import Counter
from pathlib import Path

from google.protobuf.message import DecodeError

from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_HEAD = struct.Struct("<II")
_SUFFIX = ".episodes"
_FILE_EPISODES = 256
_FILE_BYTES = 8 * 2**20


class SpoolFiles:
    """The files of one run in one folder; `number` names a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: Counter[int] = Counter()
        self._newest = 0
        self._descriptor: int | None = None
        self._num_written = 0
        self._size_bytes = 0

    def recover(self) -> list[tuple[int, trajectory_pb2.Episode]]:
        """What an earlier process left, oldest first, each with its file. Call it once, before `add`."""
        found: list[tuple[int, trajectory_pb2.Episode]] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            number = int(path.stem)
            self._newest = max(self._newest, number)
            episodes = _read(path)
            self._kept[number] = len(episodes)
            if not episodes:
                path.unlink()
            found += [(number, episode) for episode in episodes]
        return found

    def add(self, episode: trajectory_pb2.Episode) -> int:
        """Write an episode and return its file. Raises OSError, and then nothing was kept."""
        body = episode.SerializeToString()
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        if self._descriptor is None or self._num_written >= _FILE_EPISODES or self._size_bytes >= _FILE_BYTES:
            self._begin_file()
        self._write(record)
        self._num_written += 1
        self._size_bytes += len(record)
        self._kept[self._newest] += 1
        return self._newest

    def release(self, number: int) -> None:
        """One episode of a file is needed no more; the file goes with its last one."""
        self._kept[number] -= 1
        if self._kept[number]:
            return
        del self._kept[number]
        if number == self._newest:
            self.close()
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file being written; what is in it stays. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin_file(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(self._newest + 1)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._newest += 1
        self._num_written = self._size_bytes = 0

    def _write(self, record: bytes) -> None:
        assert self._descriptor is not None, "a file was begun"
        try:
            written = os.write(self._descriptor, record)
            if written < len(record):
                raise OSError(f"{written} of {len(record)} bytes could be written")
        except OSError:
            # Half a record would hide every later one of its file: the next episode begins a new file.
            self.close()
            if not self._kept[self._newest]:
                self._path(self._newest).unlink(missing_ok=True)
            raise

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{_SUFFIX}"


def _read(path: Path) -> list[trajectory_pb2.Episode]:
    """The whole records of a file, up to the first that is cut short or damaged."""
    data, at, episodes = path.read_bytes(), 0, list[trajectory_pb2.Episode]()
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            break
        try:
            episodes.append(trajectory_pb2.Episode.FromString(body))
        except DecodeError:
            break
        at += _HEAD.size + length
    if at < len(data):
        log.warning("spool.cut_short", path=str(path), episodes=len(episodes), bytes_left=len(data) - at)
    return episodes
