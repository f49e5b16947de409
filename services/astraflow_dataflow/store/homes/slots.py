"""Hash slots of a Redis cluster: which slot a key is in, and which primary has it.

Pure: a `SlotMap` is what one node answered. Used by `homes.cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from redis.crc import key_slot

from astraflow_dataflow.store.connection import info_fields
from astraflow_dataflow.store.replies import Reply, as_int, as_list, as_text

NUM_SLOTS = 16_384


@lru_cache(4096)
def slot_of(key: str) -> int:
    """Return the slot of a key: of what is between its first braces, where it has some."""
    return key_slot(key.encode())


@dataclass(frozen=True)
class SlotMap:
    """Who has which slot, as one node of the cluster sees it."""

    epoch: int
    """The highest that node knows of; newer ones are right."""
    owners: tuple[str, ...]
    """`HOST:PORT` of the primary of each slot, '' where none has it."""

    @classmethod
    def read(cls, info: Reply, slots: Reply, *, asked: str) -> SlotMap:
        """Return what CLUSTER INFO and CLUSTER SLOTS answered; `asked` is the host of the node, which may not know its
        own name.
        """
        owners = [""] * NUM_SLOTS
        for first, last, primary, *_ in map(as_list, as_list(slots)):
            host, port = as_list(primary)[:2]
            address = f"{as_text(host) if host not in (None, b'', b'?') else asked}:{as_int(port)}"
            owners[as_int(first) : as_int(last) + 1] = [address] * (as_int(last) - as_int(first) + 1)
        return cls(int(info_fields(info)["cluster_current_epoch"]), tuple(owners))

    def over(self, before: Iterable[str]) -> SlotMap:
        """The same; a slot that nobody has now is still the one's who had it before."""
        owners = (now or then for now, then in zip(self.owners, before, strict=True))
        return SlotMap(self.epoch, tuple(owners))

    @property
    def addresses(self) -> list[str]:
        """Every primary that has slots."""
        return sorted({*self.owners} - {""})

    def uncovered(self) -> str:
        """The slots that nobody has, as ranges; '' when there are none."""
        bare = [slot for slot, owner in enumerate(self.owners) if not owner]
        firsts = [slot for slot in bare if slot == 0 or self.owners[slot - 1]]
        lasts = [slot for slot in bare if slot == NUM_SLOTS - 1 or self.owners[slot + 1]]
        return ", ".join(
            f"{first}-{last}" if first < last else f"{first}"
            for first, last in zip(firsts, lasts, strict=True)
        )

    def tag_of(self, address: str) -> str:
        """Return the first number whose slot that primary has: the tag of the keys it keeps of itself, and the same for
        every server that sees this map.
        """
        return next(str(number) for number in count() if self.owners[slot_of(str(number))] == address)
