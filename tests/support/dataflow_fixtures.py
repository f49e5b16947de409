"""Fixtures of the dataflow tests: one Valkey per pytest process, one empty database and one server per test.

Every test that asks for a Redis runs on Valkey. Those of what is kept in it run once more under `.ci/run`, on the
system's redis-server, the oldest Redis that is supported.

Made visible by `tests/integration/conftest.py` and `tests/contract/conftest.py`.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, served
from support.valkey import ValkeyServer, flush, server_binary, system_redis

OF_WHAT_IS_KEPT = (
    "test_archive",
    "test_bad_redis",
    "test_data_plugins",
    "test_dataflow_",
    "test_requested_evaluations",
    "test_revoked_tokens",
    "test_run_life",
    "test_task_priorities",
)
"""How the names of the modules begin whose tests run on both."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both servers for the tests of what is kept in Redis."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if "redis_binary" in metafunc.fixturenames and name.startswith(OF_WHAT_IS_KEPT):
        both = ["valkey", pytest.param("redis7", marks=pytest.mark.ci)]
        metafunc.parametrize("redis_binary", both, indirect=True, scope="session")


@pytest.fixture(scope="session")
def redis_binary(request: pytest.FixtureRequest) -> str:
    """The server program a test runs on."""
    return system_redis() if getattr(request, "param", "") == "redis7" else server_binary()


@pytest.fixture(scope="session")
def valkey(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A running server with an append-only file."""
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), binary=redis_binary) as server:
        yield server


@pytest.fixture
def own_valkey(redis_binary: str, tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of this test alone, to be killed or spoiled."""
    with ValkeyServer(tmp_path / "own", binary=redis_binary) as server:
        yield server


@pytest.fixture
def redis_url(valkey: ValkeyServer) -> str:
    """An empty database of the shared Valkey."""
    flush(valkey.url)
    return valkey.url


@pytest.fixture
def process(redis_url: str, tmp_path: Path) -> Iterator[DataflowProcess]:
    """A server process that is not started yet."""
    server = DataflowProcess(redis_url, tmp_path)
    yield server
    server.kill()


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A dataflow server over an empty database."""
    async with served(redis_url, tmp_path) as world:
        yield world
