"""Writing files so that they survive a crash.

Invariant: when a function here returns, what it wrote is on the disk and not only in the page cache. The
file store and the mirror call it.
"""

import os
from pathlib import Path

DRAFT_SUFFIX = ".draft"


def write_synced(path: Path, *chunks: bytes | memoryview) -> None:
    """Create `path` with the chunks as content and sync it. Raises FileExistsError, and OSError as the
    system does.
    """
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes | memoryview, *, writer: str = "") -> None:
    """Give `path` this content, atomically: whoever dies leaves the content before or this one. Where several may
    replace it at once, each has a `writer` of its own, which is part of its draft's name.
    """
    draft = path.with_name(f"{path.name}{writer}{DRAFT_SUFFIX}")
    draft.unlink(missing_ok=True)
    write_synced(draft, data)
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were added to or removed from `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make what was written to the file, also through a mapping, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
