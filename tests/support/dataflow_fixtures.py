"""Fixtures of the dataflow tests: one Valkey per pytest process, one empty database and one server per test.

Made visible by `tests/integration/conftest.py` and `tests/contract/conftest.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.dataflow_world import World, served
from support.valkey import ValkeyServer, flush


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A running Valkey with an append-only file."""
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(valkey: ValkeyServer) -> str:
    """An empty database of the shared Valkey."""
    flush(valkey.url)
    return valkey.url


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A dataflow server over an empty database."""
    async with served(redis_url, tmp_path) as world:
        yield world
