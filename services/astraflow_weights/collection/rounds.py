"""The numbered rounds of collection in a store: a tombstone each, then a sweep.

Invariant: at most one round is open, because the next is created only after the sweep of the one before, and every
number is created once; whoever comes second takes part in the round that is there. What a round deletes is
decided once, by its sweep, so that any number of collectors delete the same. The collector calls it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from astraflow_kit import failpoints
from astraflow_kit.clock import Clock
from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import ObjectNotFound
from astraflow_weights.store import ObjectStore, PutResult
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import (
    Sweep,
    Tombstone,
    decode_sweep,
    decode_tombstone,
    encode_sweep,
    encode_tombstone,
)

_DELETE_THREADS = 8
# Deletions after a decision: a collector that stood still for longer leaves them to the next round.
_FRESH_S = 600.0
FORGET_S = 86_400.0
"""Age from which a finished round's tombstone is removed; no request lives that long."""


@dataclass(frozen=True, kw_only=True)
class OpenRound:
    """A round whose tombstone is in the store and which is not decided."""

    tombstone: Tombstone
    sha256: bytes


class Rounds:
    """Rounds of one policy. Not thread-safe; every call asks the store."""

    def __init__(self, store: ObjectStore, *, keys: PolicyKeys, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock

    def open(self) -> OpenRound | None:
        """The round that is under way, if there is one. Raises CorruptManifest when its tombstone is damaged."""
        tombstones, sweeps = self._numbers(self._keys.tombstones), self._numbers(self._keys.swept)
        undecided = sorted(tombstones - sweeps)
        return self._read(undecided[0]) if undecided else None

    def begin(self, parts: frozenset[bytes]) -> bool:
        """Write the tombstone of the next round. False when another collector did so first, for what it found."""
        numbers = self._numbers(self._keys.tombstones) | self._numbers(self._keys.swept)
        number = max(numbers, default=-1) + 1
        tombstone = Tombstone(number=number, parts=parts, created_time_s=self._clock.wall_time_s())
        answer = self._store.put_if_absent(
            self._keys.tombstone(number), encode_tombstone(self._keys, tombstone)
        )
        failpoints.hit("weights.collection.tombstoned")
        return answer is PutResult.CREATED

    def decide(self, sweep: Sweep) -> Sweep:
        """Write the sweep; the one that counts, which another collector may have written."""
        key = self._keys.sweep(sweep.number)
        self._store.put_if_absent(key, encode_sweep(self._keys, sweep))
        return decode_sweep(self._keys, self._store.get(key))

    def carry_out(self, found: OpenRound, sweep: Sweep, *, stopping: Callable[[], bool]) -> int:
        """Delete what the sweep says, paths before parts; the number of parts. What is left, because it stopped or
        stood still, is garbage for the next round.
        """
        if sweep.tombstone_sha256 != found.sha256:
            # Decided, and removed, long ago: this tombstone was created by somebody who slept through that.
            self._store.delete(self._keys.tombstone(sweep.number))
            return 0
        if self._clock.wall_time_s() - sweep.created_time_s > FORGET_S / 2:
            # Decided by somebody else while this process slept: the tombstone may be removed any time, and its names
            # used again.
            return 0
        fresh_until_s = self._clock.monotonic_s() + _FRESH_S

        def delete(key: str) -> bool:
            if stopping() or self._clock.monotonic_s() > fresh_until_s:
                return False
            failpoints.hit("weights.collection.deleting")
            self._store.delete(key)
            return True

        ours = (self._keys.merged, self._keys.snapshots)
        if not all(delete(key) for key in sweep.added_paths if key.startswith(ours)):
            return 0
        parts = sorted(found.tombstone.parts - sweep.kept_parts)
        with ThreadPoolExecutor(_DELETE_THREADS, thread_name_prefix="weights-collect") as pool:
            return sum(pool.map(lambda name: delete(self._keys.part(name.hex())), parts))

    def forget(self) -> None:
        """Remove the tombstones of rounds that ended a day ago; the newest stays."""
        numbers = self._numbers(self._keys.tombstones)
        for number in sorted(numbers & self._numbers(self._keys.swept))[:-1]:
            sweep = decode_sweep(self._keys, self._store.get(self._keys.sweep(number)))
            if self._clock.wall_time_s() - sweep.created_time_s > FORGET_S:
                self._store.delete(self._keys.tombstone(number))

    def names(self) -> frozenset[bytes]:
        """Every name in a tombstone of a round that is decided: a slow collector may still be deleting it."""
        found: set[bytes] = set()
        for number in self._numbers(self._keys.tombstones):
            if (round_ := self._read(number)) is not None:
                found |= round_.tombstone.parts
        return frozenset(found)

    def _numbers(self, prefix: str) -> set[int]:
        names = (info.key.removeprefix(prefix).removesuffix(".pb") for info in self._store.list(prefix))
        return {int(name) for name in names if name.isdigit()}

    def _read(self, number: int) -> OpenRound | None:
        try:
            data = self._store.get(self._keys.tombstone(number))
        except ObjectNotFound:
            # Removed since it was listed, a day after it ended.
            return None
        return OpenRound(tombstone=decode_tombstone(self._keys, data), sha256=sha256(data))
