"""The store that most tests of the weight path begin with."""

from pathlib import Path

import pytest

from astraflow_weights.store.file import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """An empty store in a folder."""
    return FileStore(tmp_path / "store")
