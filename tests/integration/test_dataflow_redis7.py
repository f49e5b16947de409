"""The same data path on the oldest Redis that is supported, as Debian 12 ships it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.dataflow_walk import walking
from support.valkey import ValkeyServer

pytestmark = pytest.mark.ci


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """The `redis-server` of the system."""
    binary = shutil.which("redis-server")
    assert binary, "install redis-server"
    server = ValkeyServer(tmp_path / "redis", binary=binary)
    server.start()
    yield server
    server.kill()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
async def test_a_random_history_conserves_on_redis_7(
    redis_server: ValkeyServer, tmp_path: Path, seed: int
) -> None:
    async with walking(redis_server.url, tmp_path, seed) as walk:
        await walk.run(400)
        walk.check_ids()
