"""Settings of a daemon that reads or writes weights: how to reach its store, beside what every daemon has.

Invariant: where the weights are comes from the run, never from here; these settings only say how to reach the
service and who asks. Nodes, trainers and `astraflow doctor` build on it, so that all three take the same
`ASTRAFLOW_STORE_*` variables.
"""

from pathlib import Path
from typing import Annotated

from astraflow_kit.settings import CommandOption, DaemonSettings
from astraflow_weights.settings import ChecksumMode, PieceBytes, RangeBytes, StoreSettings

_DEFAULT = StoreSettings()
# Begins the names of the settings that are those of `StoreSettings`.
_PREFIX = "store_"


class StoreAddress(DaemonSettings):
    """Where an S3-compatible store is, and who asks. `file://` stores need none of it."""

    store_endpoint_url: Annotated[str | None, CommandOption("The weight store")] = None
    """Address of the S3-compatible service that holds the weights; unset means AWS."""
    store_region: str | None = None
    """Its region; unset leaves it to the credentials' configuration, then `us-east-1`."""
    store_credentials_file: Path | None = None
    """Shared credentials file for the store; unset uses the default chain (environment, profile, instance role)."""
    store_profile: str | None = None
    """Profile of the credentials; one with `role_arn` assumes that role. Unset means `default`."""
    store_path_style: bool = _DEFAULT.path_style
    """Address buckets as `endpoint/bucket/key`; false means `bucket.endpoint/key`."""

    @property
    def store(self) -> StoreSettings:
        """How to talk to the weight store."""
        names = {name.removeprefix(_PREFIX): name for name in type(self).model_fields}
        return StoreSettings.model_validate(
            {name: getattr(self, names[name]) for name in StoreSettings.model_fields if name in names}
        )


class StoreAccess(StoreAddress):
    """The same for daemons that move weights: also how objects travel."""

    store_checksum_mode: ChecksumMode | None = None
    """Whether uploads carry the newer checksum headers; unset decides by the endpoint."""
    store_multipart_threshold_bytes: PieceBytes = _DEFAULT.multipart_threshold_bytes
    """Parts and assets above this are sent in pieces."""
    store_multipart_piece_bytes: PieceBytes = _DEFAULT.multipart_piece_bytes
    """Size of such a piece."""
    store_range_bytes: RangeBytes = _DEFAULT.range_bytes
    """Objects above this are read in ranges of this size, several at a time."""
