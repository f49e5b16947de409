"""The end of a folder that a program wrote which is not trusted."""

import os
from itertools import count
from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Remove it with all that is in it, also where its owner may not write (0555, as `go mod download` leaves folders),
    and however deep it is: folders come up to the first one before they are emptied, so no path grows.

    Raises OSError for what only another user may remove. A folder that is not there is removed.
    """
    if not _is_folder(folder):
        folder.unlink(missing_ok=True)
        return
    folder.chmod(0o700)
    taken, names = {entry.name for entry in os.scandir(folder)}, map(str, count())
    pending = list(map(folder.joinpath, taken))
    while pending:
        path = pending.pop()
        if not _is_folder(path):
            path.unlink()
            continue
        path.chmod(0o700)
        for inner in list(path.iterdir()):
            if _is_folder(inner):
                inner.chmod(0o700)  # whose parent changes is written, too
                pending.append(inner.rename(folder / next(name for name in names if name not in taken)))
            else:
                inner.unlink()
        path.rmdir()
    folder.rmdir()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
