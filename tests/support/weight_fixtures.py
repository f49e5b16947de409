"""Fixtures of tests that drive stores and `astraflow weights`: an S3 service, a proxy that fails, a store to ask about.

Made visible by `tests/integration/conftest.py`.
"""

import asyncio
import io
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from astraflow_bench.wan.radosgw import RadosGateway, missing_programs
from astraflow_kit import log
from astraflow_weights.store import ObjectStore
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


def ask_store(uri: str, *arguments: str, run_id: str = RUN) -> Ended:
    """Run `astraflow weights ARGUMENTS` on a store, without a server."""
    return cli.run("weights", *arguments, "--store", uri, "--run-id", run_id, "--policy", POLICY)


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


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    """A real Ceph radosgw with the bucket `bucket-rados`; to start it takes 20 s."""
    if missing := missing_programs():
        pytest.skip(missing)
    with RadosGateway(tmp_path_factory.mktemp("radosgw")) as gateway:
        gateway.create_bucket("bucket-rados")
        yield gateway


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path) -> str:
    """An empty bucket."""
    return s3_server.create_bucket(f"bucket-{abs(hash(tmp_path)):x}")


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[StoreProxy]:
    """A proxy in front of moto; give it faults."""
    with StoreProxy(s3_server.url) as proxy:
        yield proxy


@dataclass(frozen=True)
class BadNetwork:
    """A bucket, and what lies before it: a proxy that fails as told."""

    server: S3Server
    bucket: str
    proxy: StoreProxy
    honest: ObjectStore
    """The store without the proxy."""
    faulty: ObjectStore
    """The same behind it, three attempts patient."""

    def behind(self, **settings: Any) -> ObjectStore:
        """A store behind the proxy with these settings."""
        return self.server.store(self.bucket, endpoint_url=self.proxy.url, **settings)

    def unfinished(self) -> int:
        """Number of uploads that were begun and neither ended nor given up."""
        with closing(self.server.client()) as client:
            return len(client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []))


@pytest.fixture
def net(proxy: StoreProxy, s3_server: S3Server, bucket: str) -> BadNetwork:
    """An empty bucket behind a proxy without faults yet."""
    faulty = s3_server.store(bucket, endpoint_url=proxy.url, read_timeout_s=0.4)
    return BadNetwork(s3_server, bucket, proxy, s3_server.store(bucket), faulty)
