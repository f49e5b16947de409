"""The end of a folder that a program wrote which is not trusted."""

import os
import shutil
from pathlib import Path


def remove_tree(folder: Path) -> None:
    """Remove it with all that is in it, also where its owner may not write (0555, as `go mod download` leaves folders).

    Raises OSError for what only another user may remove. A folder that is not there is removed.
    """
    if not folder.is_dir() or folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    folder.chmod(0o700)
    for place, names, _ in os.walk(
        folder
    ):  # links are not followed, and a folder is opened after its name is seen
        for path in (Path(place, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder)
