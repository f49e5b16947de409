"""The store that most tests of the weight path begin with."""

from pathlib import Path

import pytest

from astraflow_weights.versions.log import VersionLog
from support.published_models import read_log
from support.weight_models import FaultyStore


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    """An empty store in a folder."""
    return FaultyStore(tmp_path / "store")


@pytest.fixture
def log(store: FaultyStore) -> VersionLog:
    """The log of that store as it is when the test begins."""
    return read_log(store)
