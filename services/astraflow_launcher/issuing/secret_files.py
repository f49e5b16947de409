"""Files that hold secrets: readable by their owner only, whole or not there, and never overwritten by accident."""

import os
import stat
from pathlib import Path
from typing import IO

from astraflow.errors import ConflictError, InvalidArgumentError


def require_absent(*paths: Path) -> None:
    """Raise ConflictError when one of these exists."""
    for path in paths:
        if path.exists():
            raise ConflictError(f"{path} exists and is not overwritten; move it away, or choose another name")


def keep_private(output: IO[str]) -> None:
    """Where this goes to a file, let only its owner read it: shells make files that everybody may read.

    Raises InvalidArgumentError for a file of somebody else's that others may read.
    """
    try:
        descriptor = output.fileno()
    except OSError:
        return  # it is no file
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) or not mode & 0o077:
        return
    try:
        os.fchmod(descriptor, stat.S_IMODE(mode) & ~0o077)
    except OSError as error:
        raise InvalidArgumentError(
            f"standard output is a file that others may read (mode {stat.S_IMODE(mode):04o}) and that this user may "
            "not change; write the secret elsewhere: --out FILE"
        ) from error


def write_file(path: Path, content: bytes, *, secret: bool = True) -> None:
    """Write a file with mode 0600, or 0644 where it is no secret; a reader sees all of it or none.

    Raises InvalidArgumentError when it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123
            os.fchmod(file.fileno(), 0o600 if secret else 0o644)
            file.write(content)
        draft.replace(path)
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be written: {error.strerror}") from error
