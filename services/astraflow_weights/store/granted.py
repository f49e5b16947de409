"""Reading a run's store without credentials of one's own: what is asked for, and what comes back.

Invariant: only keys below the run's own prefix are ever signed, and what signed addresses allow is reading. The
dataflow server signs (`store.s3_signing`), nodes read through what it signed (`store.s3_signed`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from astraflow_weights.store.layout import check_id, check_key


class ReadKind(Enum):
    """How an object is read."""

    GET = "get_object"
    HEAD = "head_object"
    LIST = "list_objects_v2"


@dataclass(frozen=True, kw_only=True)
class StoreRead:
    """One read; of a listing, `key` is the prefix and `after` the key after which the page begins."""

    kind: ReadKind
    key: str
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class SignedReads:
    """Addresses in the order asked, and how long they are valid from now on."""

    urls: tuple[str, ...]
    valid_s: float


SignReads: TypeAlias = Callable[[tuple[StoreRead, ...]], SignedReads]
"""Asks for signatures; blocks. Raises what refuses them, RetryableError when nobody answers now."""


def check_read(read: StoreRead, *, run_id: str) -> StoreRead:
    """Return the read when all it can show belongs to the run. Raises ValueError."""
    prefix = f"{check_id(run_id, what='run id')}/"
    is_list = read.kind is ReadKind.LIST
    for key in (read.key, *([read.after] if is_list and read.after else ())):
        check_key(key.removesuffix("/") if is_list else key)
        if not key.startswith(prefix):
            raise ValueError(f"{key!r} is not below {prefix!r}; a node reads only what belongs to its run")
    return read
