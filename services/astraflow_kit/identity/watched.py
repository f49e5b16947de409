"""A server's files that are read again when they change, and what it logs of that. Used by `verifier` and
`certificates`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from astraflow.connecting import watched
from astraflow.errors import AstraflowError
from astraflow_kit.log import get_logger
from astraflow_kit.settings import SettingsError

log = get_logger(__name__)

LOOK_EVERY_S = 0.5
Value = TypeVar("Value")


class WatchedFiles(watched.WatchedFiles[Value]):
    """What `parse` makes of the content of `paths`, looked at no more often than every `LOOK_EVERY_S`."""

    def __init__(self, *paths: Path, parse: Callable[..., Value]) -> None:
        """Read now. Raises SettingsError when a file cannot be read, and what `parse` raises."""
        super().__init__(*paths, read=read_file, parse=parse)

    def look_every_s(self) -> float:
        return LOOK_EVERY_S

    def report_reloaded(self, names: list[str]) -> None:
        log.info("identity.files_reloaded", files=names)

    def report_problem(self, names: list[str], error: AstraflowError) -> None:
        log.error(
            "identity.files_not_reloaded", files=names, message=error.message, in_force="what was before"
        )


def read_file(path: Path) -> bytes:
    """The content of a file of settings. Raises SettingsError with the remedy."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}; mount it, or let this user read it"
        ) from error
