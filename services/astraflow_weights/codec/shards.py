"""The part of a model that one process holds, and the digests of a model that nobody holds as a whole.

Invariant: a shard is a range of a tensor's elements in row-major order; over all processes the ranges cover
every tensor exactly once, in order of the processes (`check_cover`). The digest of a tensor does not depend
on how it is spread. Codec and shard publisher call it; a model held whole is the special case `whole`.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from astraflow_weights.codec.digest import TENSOR_DIGEST_BYTES, TensorDigest
from astraflow_weights.codec.kernel import U16, U32
from astraflow_weights.codec.peers import Peers
from astraflow_weights.codec.tensors import Array, Model, TensorSpec, flat_unsigned, specs_of

# What travels at a time when a tensor's digest is taken over the shards of several processes.
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Elements [start, start + len(elements)) of a tensor, as flat unsigned bit patterns."""

    start: int
    elements: Array

    @property
    def stop(self) -> int:
        """One after its last element."""
        return self.start + len(self.elements)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundChanges:
    """Changes among the elements of a shard from its element `start` on, up to the next of its kind.

    `start` lies on a line of the tensor's tile grid, or before the shard; positions ascend and count from it.
    """

    start: int
    positions: U32
    steps: U16


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownChanges:
    """Everything that changed in one process's bfloat16 shards since the model with `base_root`.

    Found where the weights live, so that nobody needs to compare the shards again; by tensor, ascending.
    """

    base_root: bytes
    found: Mapping[str, Sequence[FoundChanges]]

    def within(self, name: str, start: int, count: int) -> tuple[U32, U16]:
        """Positions from `start` on and steps of `count` elements of a shard, inside one tile."""
        found = self.found.get(name, ())
        place = bisect_right(found, start, key=lambda changes: changes.start) - 1
        if place < 0:
            return np.empty(0, np.uint32), np.empty(0, np.uint16)
        changes = found[place]
        first = start - changes.start
        low, high = np.searchsorted(changes.positions, np.array([first, first + count], np.uint32))
        return changes.positions[low:high] - np.uint32(first), changes.steps[low:high]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedModel:
    """What one process holds of a model. `specs` describes the whole model, sorted by name, everywhere alike.

    A tensor of which the process holds nothing is not in `shards`; one without elements is held by the first
    process, which names it. `changes` are what it has over another model, where that is known.
    """

    specs: tuple[TensorSpec, ...]
    shards: Mapping[str, Shard]
    changes: KnownChanges | None = None

    def held(self) -> Iterator[tuple[TensorSpec, Shard]]:
        """Tensors of which this process holds something, by name."""
        for spec in self.specs:
            if spec.name in self.shards:
                yield spec, self.shards[spec.name]

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements held here."""
        return sum(shard.elements.nbytes for shard in self.shards.values())


def whole(model: Model) -> ShardedModel:
    """A model held by one process. Shares its memory. Raises ValueError as `specs_of` does."""
    specs = specs_of(model)
    shards = {spec.name: Shard(start=0, elements=flat_unsigned(model[spec.name])) for spec in specs}
    return ShardedModel(specs=specs, shards=shards)


@dataclass(frozen=True, kw_only=True)
class Cover:
    """Who holds what: for each tensor the ranges of all processes, as [start, stop)."""

    specs: tuple[TensorSpec, ...]
    ranges: Sequence[Mapping[str, tuple[int, int]]]


def check_cover(model: ShardedModel, *, peers: Peers) -> Cover:
    """Exchange who holds what; a collective. Raises ValueError where ranges lack, overlap or are out of order."""
    mine = {spec.name: (shard.start, shard.stop) for spec, shard in model.held()}
    shared = [json.loads(message) for message in peers.all_gather(json.dumps(mine).encode())]
    ranges = [{name: (start, stop) for name, (start, stop) in found.items()} for found in shared]
    for spec in model.specs:
        position = 0
        for number, held in enumerate(ranges):
            start, stop = held.get(spec.name, (position, position))
            if start != position or not start <= stop <= spec.num_elements:
                raise ValueError(
                    f"process {number} holds elements [{start}, {stop}) of {spec.name!r}; expected is a range "
                    f"that begins at {position} and ends within {spec.num_elements}"
                )
            position = stop
        if position != spec.num_elements:
            raise ValueError(f"shards end at element {position} of {spec.num_elements} of {spec.name!r}")
    return Cover(specs=model.specs, ranges=ranges)


def sharded_digests(model: ShardedModel, *, cover: Cover, peers: Peers) -> tuple[TensorDigest, ...]:
    """Digests of all tensors, the same everywhere and for any number of processes; a collective.

    The process that holds most of a tensor hashes the shards of the others as they arrive, in chunks: nobody ever
    holds a tensor of which it does not hold the shard, and a tensor that one process holds whole does not travel.
    Of tensors spread evenly all but the owner's shard does, together less than one all-gather of the model: a
    small part of what a sharded forward pass moves.
    """
    owners = [_owner(spec, number, cover=cover) for number, spec in enumerate(model.specs)]
    mine = b"".join(
        digest
        for spec, owner in zip(model.specs, owners, strict=True)
        if (digest := _digest(spec, model, cover=cover, peers=peers, owner=owner))
    )
    size = TENSOR_DIGEST_BYTES
    owned = [
        iter([message[start : start + size] for start in range(0, len(message), size)])
        for message in peers.all_gather(mine)
    ]
    return tuple(
        TensorDigest(spec=spec, digest=next(owned[owner]))
        for spec, owner in zip(model.specs, owners, strict=True)
    )


def _owner(spec: TensorSpec, number: int, *, cover: Cover) -> int:
    """The process that hashes tensor `number`: of those that hold most of it, another one for each tensor."""
    held = [stop - start for start, stop in (ranges.get(spec.name, (0, 0)) for ranges in cover.ranges)]
    most = [process for process, count in enumerate(held) if count == max(held)]
    return most[number % len(most)]


def _digest(spec: TensorSpec, model: ShardedModel, *, cover: Cover, peers: Peers, owner: int) -> bytes | None:
    """The tensor's digest at its owner, None elsewhere."""
    mine = model.shards.get(spec.name)
    if peers.index != owner:
        if mine is not None:
            for chunk in _chunks(mine):
                peers.send(chunk, to=owner)
        return None
    state = xxhash.xxh3_128()
    for number, held in enumerate(cover.ranges):
        start, stop = held.get(spec.name, (0, 0))
        if number == owner:
            state.update(_bytes(mine) if mine is not None else b"")
            continue
        left = (stop - start) * spec.itemsize
        while left:
            size = min(left, CHUNK_BYTES)
            state.update(peers.receive(size, source=number))
            left -= size
    return state.digest()


def _chunks(shard: Shard) -> Iterator[memoryview]:
    data = _bytes(shard)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _bytes(shard: Shard) -> memoryview:
    return shard.elements.view(np.uint8).data
