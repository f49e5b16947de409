"""Parts of one delta or snapshot that several processes make together, each those of its own shards.

Invariant: parts are numbered through over the processes, in their order, so that together they are one set. Every
function is a collective. The shard publisher calls it, and whoever makes sharded snapshots.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from astraflow_weights.codec.parts.format import TARGET_PART_BYTES
from astraflow_weights.codec.parts.writer import PartSetHead, Placed, TileGroups, group_tiles, seal_parts
from astraflow_weights.codec.peers import Peers
from astraflow_weights.codec.tensors import TensorSpec
from astraflow_weights.publish.agreement import Encoded, on_every_rank, on_first_rank
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.versions.manifest import PartRef


@dataclass(frozen=True, kw_only=True)
class ShardParts:
    """The parts of this process, and how many elements all processes' parts change."""

    parts: Sequence[bytes]
    num_changed: int


def encode_shard_parts(
    tiles: Callable[[], Iterable[Placed]],
    *,
    head: PartSetHead,
    specs: Sequence[TensorSpec],
    peers: Peers,
) -> ShardParts:
    """Encode this process's tiles and number its parts after those of the processes before it."""
    groups: TileGroups = []

    def group() -> Encoded:
        groups.extend(group_tiles(tiles(), part_bytes=TARGET_PART_BYTES))
        changed = sum(tile.num_changed for part in groups for _, tile in part if tile is not None)
        return [len(groups), changed]

    counts, changed = zip(*on_every_rank(peers, group), strict=True)
    parts = seal_parts(
        groups, head=head, specs=specs, first=sum(counts[: peers.index]), num_parts=sum(counts)
    )
    return ShardParts(parts=parts, num_changed=sum(changed))


def announce_uploads(announce: Callable[[], object], *, uploads: Uploads, peers: Peers) -> None:
    """Let the first process tell collectors that parts are coming; every process then reads the tombstones."""
    on_first_rank(peers, lambda: bool(announce()))
    on_every_rank(peers, lambda: bool(uploads.read_tombstones()))


def upload_shard_parts(parts: Sequence[bytes], *, uploads: Uploads, peers: Peers) -> tuple[PartRef, ...]:
    """Store this process's parts; the references of all processes' parts, in their order."""
    stored = on_every_rank(peers, lambda: [asdict(ref) for ref in uploads.upload_parts(parts)])
    return tuple(PartRef(**ref) for refs in stored for ref in refs)
