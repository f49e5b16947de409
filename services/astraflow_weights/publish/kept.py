"""This process's shards of the newest published version.

Invariant: what is lent never changes: while a copy is lent, the next version is kept in a copy of its own
instead of being written over it. The publisher keeps and reads; the compactor's thread borrows.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from astraflow_weights.codec.shards import Shard, ShardedModel
from astraflow_weights.codec.tensors import require_same_specs


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """Shards of a version that is in the log, and the model root of the whole version."""

    version: int
    root: bytes
    shards: ShardedModel


class KeptVersion:
    """Owns one copy of the shards, a second one only while the first is lent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest: Kept | None = None
        """What is kept; the publisher alone may read its shards without borrowing."""
        self._lent: ShardedModel | None = None

    def keep(self, model: ShardedModel, *, version: int, root: bytes) -> None:
        """Copy the shards, in place of those kept before. Raises ModelMismatch for another architecture."""
        with self._lock:
            kept = self.newest
            if kept is not None:
                require_same_specs(kept.shards.specs, model.specs)
            if kept is None or kept.shards is self._lent:
                shards = _copied(model)
            else:
                shards = kept.shards
                for spec, shard in model.held():
                    np.copyto(shards.shards[spec.name].elements, shard.elements)
            self.newest = Kept(version=version, root=root, shards=shards)

    @contextmanager
    def lend(self) -> Iterator[Kept | None]:
        """What is kept now, unchanged until the block ends; to one borrower at a time."""
        with self._lock:
            kept = self.newest
            assert self._lent is None
            self._lent = None if kept is None else kept.shards
        try:
            yield kept
        finally:
            with self._lock:
                self._lent = None


def _copied(model: ShardedModel) -> ShardedModel:
    shards = {
        spec.name: Shard(start=shard.start, elements=np.array(shard.elements)) for spec, shard in model.held()
    }
    return ShardedModel(specs=model.specs, shards=shards)
