"""Parts of one delta or snapshot that several processes make together, each those of its own shards.

Invariant: each process numbers its own parts, and together they are one set. A part is sent as soon as it is full,
while the next tiles are encoded. Every function is a collective. The shard publisher calls it, and whoever makes
sharded snapshots.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from astraflow_weights.codec.parts.writer import PartSetHead, Placed, write_parts
from astraflow_weights.codec.peers import Peers
from astraflow_weights.codec.schema import Schema
from astraflow_weights.publish.agreement import Encoded, on_every_rank, on_first_rank
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.versions.manifest import PartRef


@dataclass(frozen=True, kw_only=True)
class ShardParts:
    """The stored parts of all processes, in their order, and how many elements they change."""

    refs: tuple[PartRef, ...]
    num_changed: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(ref.size_bytes for ref in self.refs)


def send_shard_parts(
    tiles: Callable[[], Iterable[Placed]],
    *,
    head: PartSetHead,
    schema: Schema,
    uploads: Uploads,
    peers: Peers,
) -> ShardParts:
    """Encode and store this process's tiles; what all processes stored. Raises as the store does."""

    def send() -> Encoded:
        num_changed = 0

        def counted() -> Iterator[Placed]:
            nonlocal num_changed
            for spec, tile in tiles():
                num_changed += tile.num_changed
                yield spec, tile

        parts = write_parts(counted(), head=head, schema=schema, writer=peers.index, writers=peers.size)
        refs = [asdict(ref) for ref in uploads.upload_parts(parts)]
        return {"refs": refs, "num_changed": num_changed}

    found = on_every_rank(peers, send)
    return ShardParts(
        refs=tuple(PartRef(**ref) for stored in found for ref in stored["refs"]),
        num_changed=sum(stored["num_changed"] for stored in found),
    )


def announce_uploads(announce: Callable[[], object], *, uploads: Uploads, peers: Peers) -> None:
    """Let the first process tell collectors that parts are coming; every process then reads the tombstones."""
    on_first_rank(peers, lambda: bool(announce()))
    on_every_rank(peers, lambda: bool(uploads.read_tombstones()))
