"""Settings of the weight path: store, publishing, mirror.

Invariant: frozen, bounded, unknown names refused; no environment is read here. The daemons that use the
weight path build these from their own settings and pass them in.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_FROZEN = ConfigDict(frozen=True, extra="forbid")


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
    """Seconds to wait for a connection."""
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


class PublishSettings(BaseModel):
    """When a version also offers a snapshot, and how its objects are sent."""

    model_config = _FROZEN

    snapshot_every_versions: Annotated[int, Field(ge=1, le=100_000)] = 64
    """At the latest, every so many versions offer a snapshot."""
    snapshot_chain_ratio: Annotated[float, Field(gt=0, le=100)] = 0.5
    """Offer a snapshot when the deltas since the last one would exceed this share of its bytes."""
    upload_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Objects sent at a time."""
    commit_attempts: Annotated[int, Field(ge=1, le=1000)] = 64
    """Sequence numbers tried for one entry before giving up with Unavailable."""


class MirrorSettings(BaseModel):
    """How a mirror fetches and what it keeps."""

    model_config = _FROZEN

    fetch_threads: Annotated[int, Field(ge=1, le=64)] = 8
    """Objects fetched at a time."""
    keep_versions: Annotated[int, Field(ge=1, le=100)] = 2
    """Versions kept on disk, the current one included, so that an engine may finish loading the one
    before.
    """
    max_repairs: Annotated[int, Field(ge=0, le=16)] = 2
    """Other paths tried in one call after a path proved bad."""
    max_model_bytes: Annotated[int, Field(ge=1)] = 2**42
    """Refuse versions whose tensors are larger than this in total."""
