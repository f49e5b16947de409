"""Fixtures of tests that drive stores and `astraflow weights`: an S3 service, a proxy that fails, a store to ask about.

Made visible by `tests/integration/conftest.py`.
"""

import asyncio
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from astraflow_kit import log
from astraflow_weights.store.file import FileStore
from support import cli
from support.cli import Ended
from support.dataflow_world import World
from support.s3_server import S3Server
from support.store_proxy import StoreProxy
from support.weight_models import POLICY, RUN

Ask = Callable[..., Ended]


@pytest.fixture
def quiet() -> None:
    """The server shares this process: its log must not be taken for what a command prints."""
    log.configure("test", stream=io.StringIO())


@pytest.fixture
def weight_store(tmp_path: Path) -> FileStore:
    """An empty store in a folder."""
    return FileStore(tmp_path / "weights")


def ask_store(uri: str, *arguments: str) -> Ended:
    """Run `astraflow weights ARGUMENTS` on a store, without a server."""
    return cli.run("weights", *arguments, "--store", uri, "--run-id", RUN, "--policy", POLICY)


@pytest.fixture
def ask(weight_store: FileStore) -> Ask:
    """The same, on the store of the test."""
    return partial(ask_store, weight_store.uri)


async def ask_server(world: World, *arguments: str) -> Ended:
    """Run `astraflow weights ARGUMENTS`; the server that it asks lives in this loop."""
    return await asyncio.to_thread(cli.run, "weights", *arguments, "--join", world.address)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto, in a process of its own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path) -> str:
    """An empty bucket."""
    return s3_server.create_bucket(f"bucket-{abs(hash(tmp_path)):x}")


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[StoreProxy]:
    """A proxy in front of moto; give it faults."""
    with StoreProxy(s3_server.url) as proxy:
        yield proxy
