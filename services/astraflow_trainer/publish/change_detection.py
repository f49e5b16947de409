"""Which bf16 elements of a rank's weights changed, found where the weights live.

A GPU compares its weights with the bits that were published last and hands the host six bytes per change, not
the model; the publishing thread brings a copy of its own up to date and encodes from the same changes. Invariant:
what is published is what copying the whole model would have published, to the byte. Plain torch operations on any
device, two kernels where a GPU has triton; scratch on the device is bounded by the group. The learner uses it where
the parameters live on CUDA; on a CPU comparing beside training, as `published.WeightCopies` has it, costs the
training thread less.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from astraflow_trainer.model.hf_layout import HeldTensor
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.publish.change_kernels import changed_by_kernels, is_available
from astraflow_trainer.publish.published import HeldPart, host_buffer
from astraflow_trainer.publish.publishing import ModelBytes
from astraflow_weights.codec.shards import FoundChanges, KnownChanges, ShardedModel
from astraflow_weights.codec.tensors import MAX_TILE_ELEMENTS
from astraflow_weights.codec.tiles.grid import Steps

Where = Literal["device", "host"]
_BUCKET_TILES = 128  # 512 MiB of bf16
_WORD = 4  # elements that torch operations compare at once
_ALIGNED = 16  # elements whose places a group begins and ends at: kernels then load many at once
# Changes take 6 bytes, elements 2: beyond this share copying everything is less.
_MOST_CHANGED = 1 / 3


def changed(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending positions (int32) of the elements that differ, and their wrapped steps (int16).

    Both are int16, one-dimensional, begin at a multiple of 8 bytes and have the same length, a multiple of 4. Four
    elements are compared at once, for most are equal: what is kept about each word is a byte.
    """
    if is_available(new.device):
        return changed_by_kernels(new, old)
    words = (new.view(torch.int64) != old.view(torch.int64)).nonzero().flatten()
    inside = (new.view(-1, _WORD)[words] != old.view(-1, _WORD)[words]).nonzero()
    positions = words[inside[:, 0]] * _WORD + inside[:, 1]
    return positions.to(torch.int32), new[positions] - old[positions]


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Elements of a held tensor whose changes come together; it ends at a line of the tile grid, or of words."""

    tensor: str
    start: int
    """First element, counted in the shard; up to 15 before it, so that words begin where words do."""
    count: int
    place: int
    """Of the first element among all of this rank's, as `_Places` lays them out."""


_Changes = tuple[_Bucket, FoundChanges]
"""Of one bucket, on the host."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Buckets that lie side by side and are compared in one go: the host waits for the device once."""

    buckets: tuple[_Bucket, ...]

    @property
    def place(self) -> int:
        """That of the first bucket."""
        return self.buckets[0].place

    @property
    def count(self) -> int:
        """Elements."""
        return self.buckets[-1].place + self.buckets[-1].count - self.place

    def of_buckets(self, positions: torch.Tensor, steps: torch.Tensor) -> Iterator[_Changes]:
        """Changes of the group, on the host, as those of its buckets; positions are rewritten in place."""
        places, values = positions.numpy().view(np.uint32), steps.numpy().view(np.uint16)
        starts = [bucket.place - self.place for bucket in self.buckets]
        bounds = [*np.searchsorted(places, starts).tolist(), len(places)]
        for bucket, start, (first, end) in zip(self.buckets, starts, pairwise(bounds), strict=True):
            if first < end:
                places[first:end] -= np.uint32(start)
                positions_here, steps_here = places[first:end], values[first:end]
                yield bucket, FoundChanges(start=bucket.start, positions=positions_here, steps=steps_here)


class _Places:
    """Where tensors lie in one flat array, each with room for whole words at both ends."""

    def __init__(self, held: HeldPart, *, bucket_elements: int) -> None:
        self.groups: list[_Group] = []
        self.size = 0
        for name, item in held.tensors.items():
            for bucket in self._cut(name, item, bucket_elements):
                self._add(bucket, bucket_elements)

    def _add(self, bucket: _Bucket, most: int) -> None:
        """To the last group, or a new one where that has no room."""
        if self.groups and self.groups[-1].count + bucket.count <= most:
            self.groups[-1] = _Group(buckets=(*self.groups[-1].buckets, bucket))
        else:
            self.groups.append(_Group(buckets=(bucket,)))

    def _cut(self, name: str, held: HeldTensor, bucket_elements: int) -> Iterator[_Bucket]:
        stop = -(-(held.start + held.count) // _ALIGNED) * _ALIGNED
        at = held.start // _ALIGNED * _ALIGNED
        while at < stop:
            end = min(stop, (at // bucket_elements + 1) * bucket_elements)
            yield _Bucket(tensor=name, start=at - held.start, count=end - at, place=self.size)
            self.size += end - at
            at = end


class DetectedChanges:
    """Takes what changed in a rank's weights. `take` is for the training thread, what it gives for the
    publishing thread, in order.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        publishes: bool = True,
        snapshot: Where = "device",
        bucket_tiles: int = _BUCKET_TILES,
    ) -> None:
        """`snapshot` says where the bits of the last copy are kept: on the device, or pinned on the host where
        it has no room for them; then they cross to the device at every step.
        """
        self.held = HeldPart(policy, publishes=publishes)
        self._places = _Places(self.held, bucket_elements=bucket_tiles * MAX_TILE_ELEMENTS)
        device = self.held.device
        self._staging = _Staging(pinned=device.type == "cuda")
        self._snapshot = _Snapshot(self._places, device=device, on_host=snapshot == "host")
        self._host = _HostCopy(self.held)
        self._begun = False

    @torch.no_grad()
    def take(self) -> ModelBytes:
        """Find and copy the changes since the last call; everything the first time, or when most changed."""
        found = self._changes() if self._begun else None
        if found is None:
            self._begun = True
            return self._everything()
        lent, changes = self._staging.copy(found)
        self._snapshot.keep(changes)

        def published(root: bytes) -> None:
            self._host.published(root)
            self._staging.release(lent)

        return ModelBytes(open=partial(self._host.add, changes), published=published)

    def _changes(self) -> list[tuple[_Group, torch.Tensor, torch.Tensor]] | None:
        """The changes of each group, on the device; None as soon as they are too many."""
        found, most = [], int(self.held.num_elements * _MOST_CHANGED)
        for group in self._places.groups:
            new, old = self._bits(group), self._snapshot.bits(group)
            positions, steps = changed(new, old)
            self._snapshot.replace(old, new)
            most -= len(positions)
            if most < 0:
                return None
            if len(positions):
                found.append((group, positions, steps))
        return found

    def _bits(self, group: _Group) -> torch.Tensor:
        """The weights of a group as they are now, in scratch that the next call overwrites."""
        scratch = self._snapshot.scratch[: group.count]
        scratch.zero_()
        for bucket in group.buckets:
            held = self.held.tensors[bucket.tensor]
            first, last = max(bucket.start, 0), min(bucket.start + bucket.count, held.count)
            at = bucket.place - group.place - bucket.start
            inside = scratch[first + at : last + at]
            self.held.copy_range(bucket.tensor, first, inside.view(torch.bfloat16))
        return scratch

    def _everything(self) -> ModelBytes:
        buffer = self._host.buffer()
        self.held.copy_to(buffer)
        for group in self._places.groups:
            self._snapshot.overwrite(group, self._bits(group))
        return ModelBytes(open=partial(self._host.replace, buffer), published=self._host.published)


class _Snapshot:
    """The bits at the last copy, and the scratch to compare with them."""

    def __init__(self, places: _Places, *, device: torch.device, on_host: bool) -> None:
        largest = max((group.count for group in places.groups), default=0)
        self.scratch = torch.zeros(largest, dtype=torch.int16, device=device)
        self._on_host = on_host
        self._bits = torch.zeros(
            places.size,
            dtype=torch.int16,
            device="cpu" if on_host else device,
            pin_memory=on_host and device.type == "cuda",
        )
        self._fetched = torch.zeros(largest if on_host else 0, dtype=torch.int16, device=device)

    def bits(self, group: _Group) -> torch.Tensor:
        """Those of a group, on the device."""
        kept = self._of(group)
        if not self._on_host:
            return kept
        fetched = self._fetched[: group.count]
        fetched.copy_(kept, non_blocking=True)
        return fetched

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Keep what was found on the device; on the host `keep` does that, without the bits crossing over."""
        if not self._on_host:
            old.copy_(new)

    def keep(self, changes: Sequence[_Changes]) -> None:
        """Bring the bits on the host up to date."""
        if self._on_host:
            for bucket, found in changes:
                bits = self._of(bucket).numpy().view(np.uint16)
                Steps(values=found.steps, positions=found.positions).apply_to(bits)

    def overwrite(self, group: _Group, new: torch.Tensor) -> None:
        """Keep all bits of a group."""
        self._of(group).copy_(new)

    def _of(self, part: _Bucket | _Group) -> torch.Tensor:
        return self._bits[part.place : part.place + part.count]


class _Staging:
    """Host memory that changes are copied to; used again once they are published."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(
        self, found: Sequence[tuple[_Group, torch.Tensor, torch.Tensor]]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], list[_Changes]]:
        """The memory that was taken, and the changes in it."""
        lent = self._taken(sum(len(positions) for _, positions, _ in found))
        copied, at = [], 0
        for group, positions, steps in found:
            end = at + len(positions)
            copied.append((group, lent[0][at:end], lent[1][at:end]))
            lent[0][at:end].copy_(positions, non_blocking=True)
            lent[1][at:end].copy_(steps, non_blocking=True)
            at = end
        if self._pinned:
            torch.cuda.synchronize()
        return lent, [one for group, *changes in copied for one in group.of_buckets(*changes)]

    def release(self, lent: tuple[torch.Tensor, torch.Tensor]) -> None:
        with self._lock:
            self._free.append(lent)

    def _taken(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            lent = self._free.pop() if self._free else None
        if lent is None or len(lent[0]) < count:
            room = count + count // 4
            lent = (
                torch.empty(room, dtype=torch.int32, pin_memory=self._pinned),
                torch.empty(room, dtype=torch.int16, pin_memory=self._pinned),
            )
        return lent


class _HostCopy:
    """The weights as last published, on the host; the publishing thread's but for `buffer`."""

    def __init__(self, held: HeldPart) -> None:
        self._held = held
        self._current: torch.Tensor | None = None
        self._root = b""
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []

    def buffer(self) -> torch.Tensor:
        """Memory for a copy of everything."""
        with self._lock:
            free = self._free.pop() if self._free else None
        return host_buffer(self._held) if free is None else free

    def replace(self, buffer: torch.Tensor) -> ShardedModel:
        """Everything that was copied to `buffer`."""
        with self._lock:
            self._free += [] if self._current is None else [self._current]
        self._current = buffer
        return self._held.shards(buffer)

    def add(self, changes: Sequence[_Changes]) -> ShardedModel:
        """The model with these changes over the one before."""
        assert self._current is not None
        model = self._held.shards(self._current)
        found: dict[str, list[FoundChanges]] = {}
        for bucket, item in changes:
            elements = model.shards[bucket.tensor].elements
            # Words may begin before the shard, where nothing differs.
            before = np.uint32(max(-bucket.start, 0))
            inside = elements[max(bucket.start, 0) : bucket.start + bucket.count]
            Steps(values=item.steps, positions=item.positions - before).apply_to(inside)
            found.setdefault(bucket.tensor, []).append(item)
        known: Mapping[str, Sequence[FoundChanges]] = found
        return ShardedModel(
            specs=model.specs,
            shards=model.shards,
            changes=KnownChanges(base_root=self._root, found=known),
        )

    def published(self, root: bytes) -> None:
        """The model that was opened last has this root."""
        self._root = root
