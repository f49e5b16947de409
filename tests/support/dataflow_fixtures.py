"""Fixtures of the dataflow tests: one Valkey per pytest process, one empty database and one server per test.

Every test that asks for a Redis runs on Valkey. Those of what is kept in it run once more on the redis-server of the
system, the oldest Redis that is supported: in ci where they are nearest to what Redis does, else in soak. A few of them
also run on a cluster.

Made visible by `tests/integration/conftest.py` and `tests/contract/conftest.py`.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, served
from support.valkey import ValkeyServer, flush, server_binary, system_redis
from support.valkey_cluster import ValkeyCluster, running_cluster

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
IN_CI = (
    "test_archive",
    "test_bad_redis",
    "test_dataflow_admin",
    "test_dataflow_batches",
    "test_dataflow_deletion",
    "test_dataflow_durability",
    "test_dataflow_holding",
    "test_dataflow_leases",
    "test_dataflow_model",
    "test_dataflow_outcomes",
    "test_dataflow_packs",
    "test_dataflow_payloads",
    "test_dataflow_replay",
    "test_dataflow_restarts",
    "test_dataflow_snapshots",
    "test_dataflow_switching",
    "test_dataflow_versions",
    "test_dataflow_whole",
    "test_requested_evaluations",
    "test_run_life",
)
"""Of them, those that run on the old Redis in ci. That it knows all that functions call, `test_bad_redis` shows."""
OF_PROCESSES = "test_dataflow_process"
"""How the names of those begin that are about the server's processes: they run on Valkey."""
LONG = (
    "test_a_server_killed_at_a_named_moment_loses_and_doubles_nothing",
    "test_a_server_that_is_killed_while_it_writes_leaves_each_row_once",
    "test_servers_answer_as_the_model_does",
    "test_so_they_do_with_payloads_outside",
)
"""Tests that run on the old Redis in `make soak` only: shorter ones beside them show the same."""
ON_A_CLUSTER = ("test_dataflow_deletion", "test_dataflow_packs", "test_dataflow_whole")
"""Modules whose tests run on a cluster as well: steps over several slots, and transactions of payloads and commits."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both servers for the tests of what is kept in Redis."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name.startswith(OF_PROCESSES):
        return
    if "redis_binary" in metafunc.fixturenames and name.startswith(OF_WHAT_IS_KEPT):
        is_quick = name in IN_CI and metafunc.function.__name__ not in LONG
        mark = pytest.mark.ci if is_quick else pytest.mark.soak
        both = ["valkey", pytest.param("redis7", marks=mark)]
        if name in ON_A_CLUSTER:
            both.append(pytest.param("cluster", marks=pytest.mark.ci))
        metafunc.parametrize("redis_binary", both, indirect=True, scope="session")


@pytest.fixture(scope="session")
def redis_binary(request: pytest.FixtureRequest) -> str:
    """The server program a test runs on; `cluster` for several of them."""
    named = getattr(request, "param", "")
    if named == "cluster":
        return "cluster"
    return system_redis() if named == "redis7" else server_binary()


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


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """A running cluster of three primaries."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ValkeyCluster) -> ValkeyCluster:
    """The shared cluster, empty."""
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def redis_url(request: pytest.FixtureRequest, redis_binary: str) -> str:
    """An empty database of the shared Valkey, or the shared cluster, empty."""
    if redis_binary == "cluster":
        return str(request.getfixturevalue("cluster").url)
    url = str(request.getfixturevalue("valkey").url)
    flush(url)
    return url


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
