"""The store that most tests of the weight path begin with."""

from pathlib import Path

import pytest

from astraflow_weights.versions.log import VersionLog
from support import published_models, weight_models


@pytest.fixture
def store(tmp_path: Path) -> weight_models.FaultyStore:
    """An empty store in a folder."""
    return weight_models.FaultyStore(tmp_path / "store")


@pytest.fixture
def log(store: weight_models.FaultyStore) -> VersionLog:
    """The log of that store as it is when the test begins."""
    return published_models.read_log(store)
