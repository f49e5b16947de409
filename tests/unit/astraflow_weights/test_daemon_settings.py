"""Daemons that read or write weights take one set of store settings, from options or from variables."""

from pathlib import Path

import pytest

from astraflow_kit.settings import load
from astraflow_weights import daemon_settings, settings


def test_a_file_store_needs_nothing() -> None:
    assert load(daemon_settings.StoreAccess).store == settings.StoreSettings()


def test_variables_say_how_to_reach_an_s3_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE_ENDPOINT_URL", "http://127.0.0.1:9000")
    monkeypatch.setenv("ASTRAFLOW_STORE_REGION", "eu-1")
    monkeypatch.setenv("ASTRAFLOW_STORE_CREDENTIALS_FILE", "/run/secrets/store")
    assert load(daemon_settings.StoreAccess, {"store_region": "eu-2"}).store == settings.StoreSettings(
        endpoint_url="http://127.0.0.1:9000", region="eu-2", credentials_file=Path("/run/secrets/store")
    )


def test_what_a_store_needs_beside_its_address_is_passed_on() -> None:
    values = {
        "profile": "node",
        "path_style": False,
        "checksum_mode": "when_supported",
        "multipart_threshold_bytes": 64 * 2**20,
        "multipart_piece_bytes": 8 * 2**20,
        "range_bytes": 4 * 2**20,
    }
    assert load(
        daemon_settings.StoreAccess, {f"store_{name}": value for name, value in values.items()}
    ).store == settings.StoreSettings(**values)
