"""Settings are bounded, frozen, and refuse what they do not know."""

import pytest
from pydantic import BaseModel, ValidationError

from astraflow_weights.settings import MirrorSettings, PublishSettings, StoreSettings


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (StoreSettings, {"max_attempts": 0}),
        (StoreSettings, {"read_timeout_s": 0}),
        (StoreSettings, {"endpoint": "http://x"}),
        (StoreSettings, {"multipart_piece_bytes": 5 * 2**20 - 1}),
        (StoreSettings, {"checksum_mode": "never"}),
        (StoreSettings, {"progress_window_s": 0}),
        (PublishSettings, {"snapshot_every_versions": 0}),
        (PublishSettings, {"snapshot_chain_ratio": 0}),
        (MirrorSettings, {"apply_threads": 0}),
        (MirrorSettings, {"keep": 3}),
    ],
)
def test_bad_values_and_unknown_names_are_refused(kind: type[BaseModel], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        kind(**values)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        StoreSettings().max_attempts = 3  # type: ignore[misc]
