"""A folder that is mounted, and then is not."""

from collections.abc import Callable
from pathlib import Path


def unmounted(folder: Path) -> Callable[[], None]:
    """Leave an empty mount point; the result brings the folder back, into which nothing may have been written."""
    away = folder.rename(folder.with_name("away"))
    folder.mkdir()

    def bring_back() -> None:
        assert list(folder.iterdir()) == [], "nothing went into the mount point"
        folder.rmdir()
        away.rename(folder)

    return bring_back
