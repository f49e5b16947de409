"""The store that most tests of the weight path begin with."""

from pathlib import Path

import pytest

from support.weight_models import FaultyStore


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    """An empty store in a folder."""
    return FaultyStore(tmp_path / "store")
