"""Settings of the weight path: store, publishing, mirror.

Invariant: frozen, bounded, unknown names refused; no environment is read here. The daemons that use the
weight path build these from their own settings and pass them in.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_FROZEN = ConfigDict(frozen=True, extra="forbid")
_MIB = 2**20

ChecksumMode = Literal["when_required", "when_supported"]
# No S3 service takes a piece below 5 MiB (the last excepted) or above 5 GiB.
PieceBytes = Annotated[int, Field(ge=5 * _MIB, le=5 * 2**30)]
RangeBytes = Annotated[int, Field(ge=64 * 2**10, le=5 * 2**30)]


class StoreSettings(BaseModel):
    """How to talk to an object store. `file://` stores use none of it."""

    model_config = _FROZEN

    endpoint_url: str | None = None
    """Address of an S3-compatible service; None means AWS."""
    region: str | None = None
    """Region name; None leaves it to the credentials' configuration, then `us-east-1`."""
    path_style: bool = True
    """Address buckets as `endpoint/bucket/key`, which every store accepts, instead of
    `bucket.endpoint/key`.
    """
    credentials_file: Path | None = None
    """Shared credentials file; None uses the default chain (environment, profile, instance role)."""
    profile: str | None = None
    """Profile inside the credentials file; None means `default`."""
    connect_timeout_s: Annotated[float, Field(gt=0, le=300)] = 5.0
    """Seconds to wait for a connection, and for the next 16 KiB of an upload to be taken."""
    read_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds without a byte after which an answer is given up."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 6
    """Times an operation is tried before it raises Unavailable."""
    backoff_s: Annotated[float, Field(ge=0, le=60)] = 0.1
    """Longest wait before the second attempt; doubles with each attempt, the wait is drawn below it."""
    backoff_max_s: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Bound of that doubling."""
    max_connections: Annotated[int, Field(ge=1, le=256)] = 16
    """Connections kept open."""
    checksum_mode: ChecksumMode | None = None
    """Whether uploads carry the newer checksum headers: None means `when_supported` at AWS and `when_required` at
    any other endpoint, where they are often refused or ignored.
    """
    multipart_threshold_bytes: PieceBytes = 32 * _MIB
    """Objects above this that are named by their content are sent in pieces, several at a time."""
    multipart_piece_bytes: PieceBytes = 16 * _MIB
    """Size of such a piece."""
    range_bytes: RangeBytes = 16 * _MIB
    """Objects above this are read in ranges of this size, several at a time."""
    transfer_threads: Annotated[int, Field(ge=1, le=64)] = 8
    """Pieces and ranges under way at a time, over all objects."""
    progress_bytes: Annotated[int, Field(ge=1, le=2**30)] = 64 * 2**10
    """A transfer that moves fewer bytes than this in `progress_window_s` is cut and tried again."""
    progress_window_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Seconds over which a transfer's progress is judged."""


class PublishSettings(BaseModel):
    """When a version also offers a snapshot, and how its objects are sent."""

    model_config = _FROZEN

    snapshot_every_versions: Annotated[int, Field(ge=1, le=100_000)] = 64
    """At the latest, every so many versions offer a snapshot."""
    snapshot_chain_ratio: Annotated[float, Field(gt=0, le=100)] = 0.5
    """Offer a snapshot when the deltas since the last one would exceed this share of its bytes."""
    upload_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Objects sent at a time."""
    checkpoint_every_entries: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """A checkpoint of the log is written when so many entries are in none."""
    encode_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Tiles encoded at a time, while others are sent."""
    commit_attempts: Annotated[int, Field(ge=1, le=1000)] = 64
    """Sequence numbers tried for one entry before giving up with Unavailable."""


class CollectionSettings(BaseModel):
    """What a collector keeps, and how long it waits."""

    model_config = _FROZEN

    keep_snapshots: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Newest snapshots that stay, with everything after the oldest of them."""
    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 900.0
    """Seconds between marking a part and deleting it, for pullers that cannot write a lease."""


class MirrorSettings(BaseModel):
    """How a mirror fetches and applies."""

    model_config = _FROZEN

    fetch_threads: Annotated[int, Field(ge=1, le=64)] = 8
    """Objects fetched at a time."""
    apply_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Tiles decoded and written at a time."""
    max_repairs: Annotated[int, Field(ge=0, le=16)] = 2
    """Other paths tried in one call after a path proved bad."""
    max_model_bytes: Annotated[int, Field(ge=1)] = 2**42
    """Refuse versions whose tensors are larger than this in total."""
    record_changes: bool = False
    """Say which elements an `advance` changed, which reads every changed tile once more."""
    lock_patience_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Longest time to wait for engines that load from the mirror before a version is applied to it."""
