"""What lies in the archives that the product packs."""

import tarfile
from pathlib import Path


def content(path: Path) -> dict[str, bytes]:
    """Entry name without the leading folder -> bytes."""
    with tarfile.open(path) as tar:
        return {
            member.name.partition("/")[2]: tar.extractfile(member).read()  # type: ignore[union-attr]
            for member in tar
        }
