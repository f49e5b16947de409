"""Log files that other processes append to, kept below a size while they do.

Invariant: a log and the `KEPT` older ones beside it (`node-1.log`, `node-1.1.log` the newest of them) take at most
`MAX_BYTES` each, but for what is written between two looks, and read in that order they are what was written. The file
that a process has open stays the same one, so whoever inherited it, Redis or a reward's own process too, goes on
writing into it: it must be open to append. A kill at any point doubles lines at most. Used by who starts processes, and
by who goes on with a file of lines that an earlier process of its own wrote.
"""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 16 * 2**20
KEPT = 3
_LOOK_S = 5.0
_COPIED_BYTES = 2**20
_LOOKED_AT_BYTES = 2**16


async def ended_with_bounded_log(
    process: asyncio.subprocess.Process, path: Path, *, max_bytes: int = MAX_BYTES, look_s: float = _LOOK_S
) -> int:
    """Wait for the end of a process that appends to `path`, which is rotated meanwhile; returns its exit code.

    Never rotated afterwards: what a process said at its end is where it wrote it.
    """
    ended = asyncio.ensure_future(process.wait())
    try:
        while not (await asyncio.wait((ended,), timeout=look_s))[0]:
            with suppress(OSError):  # a full disk: the next look may find room, and the process goes on
                await asyncio.to_thread(rotate, path, max_bytes=max_bytes)
    finally:
        ended.cancel()
    return ended.result()


def rotate(path: Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> bool:
    """Move what is in a log that has reached `max_bytes` to the file of the newest older one; whether it had.

    What is written in the instant between the last byte copied and the cut is lost: microseconds at each `max_bytes`.
    """
    if not path.exists() or path.stat().st_size < max_bytes:
        return False
    draft = path.with_name(f".{path.name}.part")
    with path.open("r+b", buffering=0) as log, draft.open("wb", buffering=0) as copy:
        shutil.copyfileobj(log, copy, _COPIED_BYTES)
        for number in range(kept - 1, 0, -1):
            with suppress(FileNotFoundError):
                older(path, number).replace(older(path, number + 1))
        draft.replace(older(path, 1))
        # Written while the others were renamed: `copy` is the newest older one by now.
        shutil.copyfileobj(log, copy, _COPIED_BYTES)
        os.ftruncate(log.fileno(), 0)
    return True


def end_of(path: Path, *, num_bytes: int) -> str:
    """The end of a log, also where it was rotated just before; empty where there is none."""
    found = b""
    for part in (path, older(path, 1)):
        if len(found) < num_bytes and part.exists():
            with part.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - (num_bytes - len(found))))
                found = log.read() + found
    return found[-num_bytes:].decode(errors="replace")


def drop_cut_line(path: Path) -> int:
    """Remove the last line of a file of lines where a kill cut it short; returns how many bytes it had."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        end = whole = file.seek(0, os.SEEK_END)
        while whole:
            start = max(0, whole - _LOOKED_AT_BYTES)
            file.seek(start)
            found = file.read(whole - start).rfind(b"\n")
            if found >= 0:
                whole = start + found + 1
                break
            whole = start
        if whole < end:
            file.truncate(whole)
    return end - whole


def older(path: Path, number: int) -> Path:
    """Where the log's older content is; 1 is the newest of it."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
