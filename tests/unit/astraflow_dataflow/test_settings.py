"""Settings of the server."""

from pathlib import Path

import pytest

from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_kit.settings import SettingsError, load


def test_redis_is_required_and_must_be_a_url() -> None:
    with pytest.raises(SettingsError, match="ASTRAFLOW_REDIS"):
        load(DataflowServerSettings, {})
    with pytest.raises(SettingsError, match="redis"):
        load(DataflowServerSettings, {"redis": "localhost:6379"})


def test_the_work_folder_is_expanded() -> None:
    settings = load(DataflowServerSettings, {"redis": "redis://127.0.0.1:1", "work_dir": Path("~/x")})
    assert settings.work_dir == Path.home() / "x"
