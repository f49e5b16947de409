"""Nodes without credentials read what the dataflow server signs: their run's objects, for a while, and nothing else."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import version_service_pb2 as pb
from astraflow.errors import AstraflowError, InvalidArgumentError, PreconditionError, UnavailableError
from astraflow_bench.wan.radosgw import RadosGateway
from astraflow_raas.policies.granted_store import granted_store
from astraflow_weights.errors import ObjectNotFound, StoreRefused, Unavailable
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.store.granted import SignedReads, StoreRead
from astraflow_weights.store.s3_signed import open_signed_store
from astraflow_weights.store.s3_signing import ReadSigner
from support.dataflow_world import World, served
from support.published_models import POLICY, RUN, published, pulled
from support.s3_server import S3Server
from support.weight_models import same_model

pytestmark = pytest.mark.integration

MIB = 2**20
GET, HEAD, LIST = pb.STORE_READ_KIND_GET, pb.STORE_READ_KIND_HEAD, pb.STORE_READ_KIND_LIST


class Place:
    """A store, its settings with credentials, and those of a node, which has none."""

    def __init__(self, uri: str, settings: StoreSettings) -> None:
        self.uri, self.settings = uri, settings
        self.signer = ReadSigner(settings, life_s=900)
        self.asked: list[StoreRead] = []

    @property
    def own(self) -> ObjectStore:
        """The store as a trainer has it."""
        return open_store(self.uri, settings=self.settings)

    def sign(self, reads: tuple[StoreRead, ...]) -> SignedReads:
        """What the dataflow server does, without one."""
        self.asked += reads
        return self.signer.sign(self.uri, reads, run_id=RUN)

    def granted(self, **changes: Any) -> ObjectStore:
        """The store as a node without credentials or endpoint has it."""
        fast = StoreSettings(max_attempts=3, backoff_s=0.001, **changes)
        return open_signed_store(self.uri, sign=self.sign, settings=fast)


@pytest.fixture(params=["s3", pytest.param("radosgw", marks=[pytest.mark.ci, pytest.mark.timeout(300)])])
def place(request: pytest.FixtureRequest) -> Place:
    """An empty store of each kind."""
    if request.param == "radosgw":
        gateway: RadosGateway = request.getfixturevalue("radosgw")  # which checks signatures
        return Place(f"s3://bucket-rados/{secrets.token_hex(8)}", gateway.settings())
    server: S3Server = request.getfixturevalue("s3_server")
    return Place(f"s3://{request.getfixturevalue('bucket')}/some/prefix", server.settings())


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing in this process's environment lets it into a store."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.mark.usefixtures("no_credentials")
def test_a_node_without_credentials_pulls_a_version_bit_by_bit(place: Place) -> None:
    models = published(place.own, 3)
    assert same_model(pulled(place.granted(), 2), models[2])
    assert place.asked
    assert all(read.key.startswith(f"{RUN}/{POLICY}/") for read in place.asked)


@pytest.mark.usefixtures("no_credentials")
def test_a_large_object_is_read_in_ranges_through_one_address(place: Place) -> None:
    key, content = f"{RUN}/{POLICY}/large", secrets.token_bytes(MIB) * 3
    place.own.put_if_absent(key, content)
    store = place.granted(range_bytes=MIB // 2)
    assert store.get(key) == content
    assert store.get_range(key, start=MIB - 3, length=9) == content[MIB - 3 : MIB + 6]
    assert store.head(key).size_bytes == len(content)
    assert len({read.kind for read in place.asked}) == len(place.asked), "one address per kind of read"


@pytest.mark.usefixtures("no_credentials")
def test_listings_are_signed_page_by_page_and_what_is_missing_is_missing(place: Place) -> None:
    keys = [f"{RUN}/{POLICY}/seq/{number:03d}" for number in range(5)]
    for key in keys:
        place.own.put_if_absent(key, b"x")
    store = place.granted()
    assert [item.key for item in store.list(f"{RUN}/{POLICY}/seq/")] == keys
    assert [item.key for item in store.list(f"{RUN}/{POLICY}/seq/", after=keys[2])] == keys[3:]
    with pytest.raises(ObjectNotFound):
        store.get(f"{RUN}/{POLICY}/none")


def test_what_would_write_is_refused_before_anything_is_sent(place: Place) -> None:
    with pytest.raises(StoreRefused, match="granted this node only reads"):
        place.granted().put_if_absent(f"{RUN}/{POLICY}/seq/0", b"x")
    with pytest.raises(StoreRefused, match="granted this node only reads"):
        place.granted().delete(f"{RUN}/{POLICY}/seq/0")
    assert place.asked == []


@pytest.mark.usefixtures("no_credentials")
def test_an_address_that_the_store_does_not_take_any_more_is_replaced(place: Place) -> None:
    key = f"{RUN}/{POLICY}/kept"
    place.own.put_if_absent(key, b"content")

    def expired_once(reads: tuple[StoreRead, ...]) -> SignedReads:
        signed = place.sign(reads)
        if len(place.asked) > 1:
            return signed
        urls = tuple(url.replace("X-Amz-Expires=900", "X-Amz-Expires=0") for url in signed.urls)
        return SignedReads(urls=urls, valid_s=900)

    store = open_signed_store(place.uri, sign=expired_once, settings=StoreSettings(backoff_s=0.001))
    assert store.get(key) == b"content"
    assert len(place.asked) == 2


def test_a_server_that_does_not_sign_now_is_a_store_that_does_not_answer_now(place: Place) -> None:
    def away(_: tuple[StoreRead, ...]) -> SignedReads:
        raise UnavailableError("the server restarts")

    fast = StoreSettings(max_attempts=2, backoff_s=0.001)
    with pytest.raises(Unavailable, match="the server restarts"):
        open_signed_store(place.uri, sign=away, settings=fast).get(f"{RUN}/x")


async def test_a_node_that_joins_is_granted_its_run_and_nothing_else(
    redis_url: str, tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    access = {"store_endpoint_url": s3_server.url, "store_credentials_file": s3_server.credentials_file}
    uri = f"s3://{bucket}/runs"
    models = published(s3_server.store(f"{bucket}/runs"), 2)
    async with served(redis_url, tmp_path, store_grants=True, **access) as world:
        await world.create_run(name=RUN, store_uri=uri)
        joined = await world.join("n1", max_concurrent_tasks=1)
        (grant,) = joined.store_grants
        assert (grant.uri_prefix, grant.signed_reads, dict(grant.credentials)) == (f"{uri}/{RUN}/", True, {})
        own = open_store(uri)
        store = granted_store(joined, own, client=world.client, settings=StoreSettings(backoff_s=0.001))
        assert same_model(await asyncio.to_thread(pulled, store, 1), models[1])
        refused = [
            ("other/solver/seq/0", "not below"),
            (f"{RUN}/../other/x", "not allowed"),
            ("", "not allowed"),
        ]
        for key, words in [*refused, (f"{RUN}x/solver", "not below"), ("probe/create-only", "not below")]:
            with pytest.raises(InvalidArgumentError, match=words):
                await sign(world, pb.StoreRead(kind=GET, key=key))
        with pytest.raises(InvalidArgumentError, match="not below"):
            await sign(world, pb.StoreRead(kind=LIST, key=f"{RUN}/", after="other/x"))
        with pytest.raises(InvalidArgumentError, match="kind is STORE_READ_KIND_UNSPECIFIED"):
            await sign(world, pb.StoreRead(key=f"{RUN}/x"))
        with pytest.raises(AstraflowError):
            await asyncio.to_thread(store.get, "other/solver/seq/0")


async def test_a_server_without_grants_gives_none(world: World) -> None:
    await world.create_run(store_uri="s3://bucket/runs")
    joined = await world.join("n1", max_concurrent_tasks=1)
    assert not joined.store_grants
    own = open_store("s3://bucket/runs")
    assert granted_store(joined, own, client=world.client, settings=StoreSettings()) is own
    with pytest.raises(PreconditionError, match="start it with --store-grants"):
        await sign(world, pb.StoreRead(kind=HEAD, key="run/x"))


async def sign(world: World, *reads: pb.StoreRead) -> pb.SignReadsResponse:
    """Have reads signed."""
    return await world.ask(pb.SignReadsResponse, reads=reads)


def test_a_server_without_credentials_to_sign_with_says_so_at_its_start(
    no_credentials: None, tmp_path: Path
) -> None:
    with pytest.raises(StoreRefused, match="no credentials are found; give store_credentials_file"):
        ReadSigner(StoreSettings(credentials_file=tmp_path / "none"), life_s=900)
