"""Earlier releases, and the versions of everything that they write: which of them reads data that this one refuses.

Invariant: the last row is the newest release before this one; a row never changes, and each closing of a release adds
one. `tests/releases` checks the commits out, writes data with them and resumes it with this release. Called by
whatever reads data that another release may have written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from astraflow import __version__
from astraflow.errors import IncompatibleError

Format = Literal["redis", "data_dir", "checkpoint", "log"]


@dataclass(frozen=True)
class Release:
    """A commit of main, with the versions of what it writes."""

    version: str
    commit: str
    contract: int
    redis: int
    data_dir: int = 2
    checkpoint: int = 4
    log: int = 2

    def __str__(self) -> str:
        return f"astraflow {self.version} (commit {self.commit[:12]})"


RELEASES = (
    Release("0.1.0", "b0032888038e4d28d68011e0ee6e6aa73bbba551", contract=2, redis=1),
    Release("0.1.0", "6891fd5b68254a49d868c1cb6f7febbb236c9368", contract=2, redis=2),
    Release("0.1.0", "6ee3950cfd2c3f79122af184b2e1526881e9d118", contract=2, redis=3),
    Release("0.1.0", "e34e5b6409ad15b9ce4ebf13e1c85e094fc22357", contract=2, redis=4),
    Release("0.1.0", "da6278bf3107395e882d6be75e8776a0b22bef40", contract=3, redis=5),
    Release("0.1.0", "bfe6711a2b6d21b180995a95bd2e3885334ad64d", contract=3, redis=6),
    Release("0.2.0", "f6bdcd386a6b65050e63dfe0d8054d6b8464e24f", contract=4, redis=7, data_dir=3),
)


def refuse(
    what: str, *, format_: Format, found: object, reads: Sequence[int], otherwise: str
) -> IncompatibleError:
    """Return the refusal of `what`, which another release wrote: with what was found, what this release reads, which
    release reads it, and what to do instead.
    """
    readers = [release for release in RELEASES if getattr(release, format_) == found]
    is_later = isinstance(found, int) and found > max(reads)
    reader = "a later release" if is_later else "an earlier release"
    return IncompatibleError(
        f"{what} has schema version {found}, astraflow {__version__} reads {' and '.join(map(str, reads))}; "
        f"{readers[-1] if readers else reader} reads it: go on with that one, or {otherwise}"
    )
