"""What every object store must do, over a folder, moto and a real Ceph radosgw (mark `ci`), and how faults are met."""

import random
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from astraflow_bench.wan.radosgw import RadosGateway
from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import ObjectNotFound, StoreRefused, Unavailable, VerificationFailed
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectInfo, ObjectStore, PutResult, open_store
from astraflow_weights.store.probing import probe_create_only
from support.published_models import ModelPublisher, open_writer, published, pulled, read_log, steps
from support.s3_server import S3Server
from support.store_proxy import Fault
from support.weight_fixtures import BadNetwork
from support.weight_models import same_model

pytestmark = pytest.mark.integration


MIB = 2**20
PIECES = {"multipart_threshold_bytes": 5 * MIB, "multipart_piece_bytes": 5 * MIB, "range_bytes": 4 * MIB}
"""As small as S3 allows, so that what is above 5 MiB travels in pieces."""


# The longest part of a test over radosgw is its share of the start.
@pytest.fixture(
    params=["file", "s3", pytest.param("radosgw", marks=[pytest.mark.ci, pytest.mark.timeout(300)])]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "file":
        return open_store((tmp_path / "store").as_uri())
    if request.param == "radosgw":
        gateway: RadosGateway = request.getfixturevalue("radosgw")
        settings = gateway.settings().model_copy(update=PIECES)
        return open_store(f"s3://bucket-rados/{secrets.token_hex(8)}", settings=settings)
    server: S3Server = request.getfixturevalue("s3_server")
    return server.store(f"{request.getfixturevalue('bucket')}/some/prefix", **PIECES)


def large(size: int = 11 * MIB + 7) -> tuple[str, bytes]:
    """A key that names its content, and the content, in which no two ranges are equal."""
    content = random.Random(size).randbytes(size)
    return f"run/policy/parts/{sha256(content).hex()}.afwd", content


def test_large_content_comes_back_whole_and_in_ranges(store: ObjectStore) -> None:
    key, content = large()
    assert store.put_if_absent(key, content) is PutResult.CREATED
    assert store.put_if_absent(key, content) is PutResult.EXISTS
    assert store.get(key) == content
    assert store.head(key).size_bytes == len(content)
    for start, length in ((0, 9 * MIB), (3 * MIB + 1, 2 * MIB), (7 * MIB, 99 * MIB), (12 * MIB, 5 * MIB)):
        assert store.get_range(key, start=start, length=length) == content[start : start + length]
    assert [info.key for info in store.list("")] == [key]


def raced(store: ObjectStore, key: str, contents: list[bytes]) -> list[PutResult]:
    """What each of those is told that create a key at one moment."""
    barrier = threading.Barrier(len(contents))

    def create(content: bytes) -> PutResult:
        barrier.wait(timeout=10)
        return store.put_if_absent(key, content)

    with ThreadPoolExecutor(len(contents)) as pool:
        return list(pool.map(create, contents))


def test_of_racing_senders_of_large_content_each_succeeds_and_it_is_whole(store: ObjectStore) -> None:
    key, content = large(6 * MIB)
    assert PutResult.CREATED in raced(store, key, [content] * 3)
    assert store.get(key) == content


def test_large_content_that_its_name_does_not_tell_is_still_created_once(store: ObjectStore) -> None:
    contents = [bytes([number]) * (6 * MIB) for number in range(3)]
    results = raced(store, "large", contents)
    assert results.count(PutResult.CREATED) == 1
    assert store.get("large") == contents[results.index(PutResult.CREATED)]


@pytest.mark.parametrize("later", [b"second", b"x" * 100_000], ids=["small", "large"])
def test_a_key_is_created_once_and_nothing_is_left_of_the_losers_bytes(
    store: ObjectStore, later: bytes
) -> None:
    assert store.put_if_absent("a/key", b"first") is PutResult.CREATED
    assert store.put_if_absent("a/key", later) is PutResult.EXISTS
    assert store.get("a/key") == b"first"
    assert list(store.list("")) == [ObjectInfo(key="a/key", size_bytes=5)]


def test_the_probe_accepts_it_and_leaves_nothing(store: ObjectStore) -> None:
    probe_create_only(store, remember=False)
    assert list(store.list("")) == []


def test_of_racing_creators_exactly_one_wins(store: ObjectStore) -> None:
    contents = [b"writer %d" % writer for writer in range(6)]
    for key in ("race/0", "race/1", "race/2", "race/3", "race/4"):
        results = raced(store, key, contents)
        assert results.count(PutResult.CREATED) == 1
        assert store.get(key) == contents[results.index(PutResult.CREATED)]


def test_hints_are_overwritten(store: ObjectStore) -> None:
    store.put("latest", b"1")
    store.put("latest", b"2")
    assert store.get("latest") == b"2"


@pytest.mark.parametrize("size", [0, 1, 300_000])
def test_content_comes_back_whole(store: ObjectStore, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    store.put_if_absent("key", content)
    assert store.get("key") == content
    assert store.head("key") == ObjectInfo(key="key", size_bytes=size)


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 4, b"0123"), (3, 2, b"34"), (8, 10, b"89"), (10, 5, b""), (99, 1, b""), (5, 0, b"")],
)
def test_ranges_are_cut_at_the_end(store: ObjectStore, start: int, length: int, expected: bytes) -> None:
    store.put_if_absent("key", b"0123456789")
    assert store.get_range("key", start=start, length=length) == expected


def test_what_is_missing_is_not_found(store: ObjectStore) -> None:
    for read in (store.get, store.head, lambda key: store.get_range(key, start=0, length=0)):
        with pytest.raises(ObjectNotFound, match="has no object 'no/such'"):
            read("no/such")


def test_deleting_is_idempotent(store: ObjectStore) -> None:
    store.put_if_absent("key", b"x")
    store.delete("key")
    store.delete("key")
    with pytest.raises(ObjectNotFound):
        store.get("key")
    assert store.put_if_absent("key", b"y") is PutResult.CREATED


def test_listing_is_ordered_by_key_and_limited_by_prefix_and_after(store: ObjectStore) -> None:
    for key in ("b/2", "a/1", "b/10", "b/1", "bc"):
        store.put_if_absent(key, key.encode())
    assert [info.key for info in store.list("")] == ["a/1", "b/1", "b/10", "b/2", "bc"]
    later = [(info.key, info.size_bytes) for info in store.list("b/", after="b/1")]
    assert later == [("b/10", 4), ("b/2", 3)]
    assert [info.key for info in store.list("b")] == ["b/1", "b/10", "b/2", "bc"]
    assert list(store.list("none/")) == []


@pytest.mark.parametrize("key", ["../escape", "/absolute", "", "a//b", "a/../../b"])
def test_keys_that_leave_the_store_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        store.put_if_absent(key, b"x")


def test_versions_travel_from_publisher_to_mirror(store: ObjectStore, tmp_path: Path) -> None:
    models = published(store, 4)
    log, mirror = read_log(store), Mirror(tmp_path / "mirror")
    assert len(log.records) == 4
    mirror.advance(store, log, target=1)
    assert mirror.advance(store, log, target=3).counts.deltas_fetched == 2
    assert same_model(mirror.load(), models[3])


def test_writers_of_many_keys_do_not_disturb_each_other(store: ObjectStore) -> None:
    contents = {f"folder-{number % 7}/{number}": bytes([number]) * number for number in range(60)}
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda item: store.put_if_absent(*item), contents.items()))
    assert set(results) == {PutResult.CREATED}
    listed = {info.key: info.size_bytes for info in store.list("")}
    assert listed == {key: len(content) for key, content in contents.items()}
    assert {key: store.get(key) for key in contents} == contents


def test_a_reader_beside_overwriting_writers_sees_only_whole_hints(store: ObjectStore) -> None:
    store.put("latest", b"a" * 50_000)
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(store.put, "latest", letter * 50_000) for letter in (b"b", b"c", b"d") * 3]
        seen = [store.get("latest") for _ in range(20)]
        for write in writing:
            write.result()
    assert {(len(content), len(set(content))) for content in seen} == {(50_000, 1)}


def test_a_listing_is_taken_while_others_write(store: ObjectStore) -> None:
    for number in range(0, 40, 2):
        store.put_if_absent(f"seq/{number:03d}", b"")
    listing = iter(store.list("seq/"))
    first = next(listing)
    for number in range(1, 40, 2):
        store.put_if_absent(f"seq/{number:03d}", b"")
    keys = [first.key, *(info.key for info in listing)]
    assert keys == sorted(keys)
    assert {f"seq/{number:03d}" for number in range(0, 40, 2)} <= set(keys)


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1)])
def test_negative_ranges_are_the_callers_mistake(store: ObjectStore, start: int, length: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        store.get_range("key", start=start, length=length)


def test_addresses_in_messages_carry_no_secret(store: ObjectStore) -> None:
    assert store.uri.startswith(("file:///", "s3://bucket-"))
    assert "test:" not in store.uri


def test_a_listing_of_many_pages_is_whole(s3_server: S3Server) -> None:
    client = s3_server.client()
    client.create_bucket(Bucket="many")
    for number in range(1005):
        client.put_object(Bucket="many", Key=f"seq/{number:05d}", Body=b"")
    client.close()
    store = s3_server.store("many")
    assert [info.key for info in store.list("seq/")] == [f"seq/{number:05d}" for number in range(1005)]


def test_a_prefix_separates_stores_of_one_bucket(s3_server: S3Server, bucket: str) -> None:
    one, other = (s3_server.store(f"{bucket}/{name}") for name in ("a", "a-longer"))
    assert one.put_if_absent("key", b"1") is PutResult.CREATED
    assert other.put_if_absent("key", b"2") is PutResult.CREATED
    assert (one.get("key"), [info.key for info in one.list("")]) == (b"1", ["key"])


Change = Callable[[StoreSettings], StoreSettings]


def changed(**values: object) -> Change:
    """Settings with these values instead."""
    return lambda settings: settings.model_copy(update=values)


REFUSALS: dict[str, tuple[str, Change, str]] = {
    "bucket with an impossible name": ("s3://No_Such", changed(), r"No_Such.*check bucket name"),
    "prefix that leaves the bucket": ("s3://b/../c", changed(), r"s3://b/\.\./c.*segments that do not begin"),
    "endpoint without a scheme": (
        "s3://b",
        changed(endpoint_url="127.0.0.1:9000"),
        r"'127\.0\.0\.1:9000' is not understood.*use http://HOST:PORT",
    ),
    "unknown profile": ("s3://b", changed(profile="nobody"), "nobody.*name a profile"),
}


@pytest.mark.parametrize("row", REFUSALS)
def test_a_store_that_cannot_be_used_is_refused_with_the_remedy(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    uri, change, words = REFUSALS[row]
    with pytest.raises(StoreRefused, match=words):
        probe_create_only(open_store(uri, settings=change(s3_server.settings())))


def test_a_service_that_ignores_create_only_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with S3Server(tmp_path, ignore_create_only=True) as server:
        store = server.store(f"{server.create_bucket('careless')}/x")
        with pytest.raises(StoreRefused, match="two trainers could overwrite each other; use a store that"):
            probe_create_only(store)
        assert list(store.list("")) == []


PASSING = [500, 503, 429, 409, Fault.RESET, Fault.STALL]


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_a_passing_fault_is_retried_with_the_same_condition(net: BadNetwork, fault: Fault | int) -> None:
    net.proxy.faults = [fault, fault]
    assert net.faulty.put_if_absent("key", b"mine") is PutResult.CREATED
    assert net.honest.get("key") == b"mine"
    assert net.proxy.requests == [("PUT", "*")] * 3


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.LATE, Fault.GARBAGE], ids=str)
def test_a_create_whose_answer_is_lost_is_settled_by_reading_back(net: BadNetwork, fault: Fault) -> None:
    net.proxy.faults = [fault]
    assert net.faulty.put_if_absent("key", b"mine") is PutResult.CREATED
    assert net.proxy.requests == [("PUT", "*"), ("PUT", "*"), ("GET", None)]


def test_a_create_is_settled_also_when_reading_back_fails_at_first(net: BadNetwork) -> None:
    net.proxy.faults = [Fault.LOST, 503]
    assert net.faulty.put_if_absent("key", b"mine") is PutResult.CREATED
    assert [method for method, _ in net.proxy.requests] == ["PUT", "PUT", "PUT", "GET"]


@pytest.mark.parametrize("fault", [500, Fault.RESET, Fault.STALL, Fault.LOST], ids=str)
def test_an_unclear_answer_does_not_hide_that_another_won(net: BadNetwork, fault: Fault | int) -> None:
    net.honest.put_if_absent("key", b"theirs")
    net.proxy.faults = [fault]
    assert net.faulty.put_if_absent("key", b"mine") is PutResult.EXISTS
    assert net.honest.get("key") == b"theirs"


def test_of_racing_creators_behind_a_bad_network_one_wins(net: BadNetwork) -> None:
    net.proxy.faults = [Fault.LOST, 503, Fault.RESET, Fault.LOST]
    contents = [b"writer %d" % writer for writer in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda content: outcome_of(net.faulty, content), contents))
    assert results.count(PutResult.CREATED) <= 1
    winner = net.honest.get("race")
    assert results[contents.index(winner)] in (PutResult.CREATED, None)
    assert [result for result in results if result is not None].count(PutResult.EXISTS) >= 2


def outcome_of(store: ObjectStore, content: bytes) -> PutResult | None:
    """What a creator was told; None when it may never know."""
    try:
        return store.put_if_absent("race", content)
    except Unavailable:
        return None


@pytest.mark.parametrize("fault", [*PASSING, Fault.LOST, Fault.LATE, Fault.CUT, Fault.SLOW], ids=str)
def test_reading_outlasts_a_bad_answer(net: BadNetwork, fault: Fault | int) -> None:
    content = b"content" * 1000
    net.honest.put_if_absent("key", content)
    for read in (
        lambda: net.faulty.get("key"),
        lambda: net.faulty.get_range("key", start=0, length=len(content)),
        lambda: content if net.faulty.head("key").size_bytes == len(content) else b"",
    ):
        net.proxy.faults = [fault]
        assert read() == content


@pytest.mark.parametrize("fault", [*PASSING, Fault.LOST, Fault.CUT, Fault.GARBAGE], ids=str)
def test_a_listing_outlasts_a_bad_answer(net: BadNetwork, fault: Fault | int) -> None:
    net.honest.put_if_absent("a/key", b"x")
    net.proxy.faults = [fault]
    assert [info.key for info in net.faulty.list("a/")] == ["a/key"]


@pytest.mark.parametrize("fault", [503, Fault.RESET, Fault.LOST, Fault.STALL], ids=str)
def test_a_lasting_fault_ends_as_unavailable_after_the_attempts_allowed(
    net: BadNetwork, fault: Fault | int
) -> None:
    net.proxy.faults = [fault] * 3
    with pytest.raises(Unavailable, match=r"'key' failed 3 times, last: .*check that the store at http://"):
        net.faulty.put_if_absent("key", b"x")
    assert len(net.proxy.requests) == 3


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, r"AccessDenied \(403\).*let these credentials get, put, list and delete"),
        (501, r"NotImplemented \(501\).*supports PUT with `If-None-Match: \*`"),
    ],
)
def test_a_refusal_is_not_retried(net: BadNetwork, status: int, words: str) -> None:
    net.proxy.faults = [status]
    with pytest.raises(StoreRefused, match=words):
        net.faulty.put_if_absent("key", b"x")
    assert len(net.proxy.requests) == 1


def test_a_part_that_arrives_wrong_once_is_fetched_again(net: BadNetwork, tmp_path: Path) -> None:
    published(net.honest, 2)
    net.proxy.only, net.proxy.faults = "/parts/", [Fault.WRONG]
    result = Mirror(tmp_path / "mirror").advance(net.faulty, read_log(net.honest), target=1)
    assert (result.version, result.rejected, net.proxy.faults) == (1, frozenset(), [])


def test_a_store_that_sends_wrong_parts_leaves_the_old_version(net: BadNetwork, tmp_path: Path) -> None:
    models = published(net.honest, 2)
    log, mirror = read_log(net.honest), Mirror(tmp_path / "mirror")
    mirror.advance(net.honest, log, target=0)
    net.proxy.only, net.proxy.faults = "/parts/", [Fault.WRONG] * 20
    with pytest.raises(VerificationFailed, match=r"delta from version 0 of version 1 .*sha256"):
        mirror.advance(net.faulty, log, target=1)
    assert mirror.version == 0
    assert same_model(mirror.load(), models[0])


def test_versions_are_published_once_over_a_bad_network(net: BadNetwork) -> None:
    publisher, models = ModelPublisher(open_writer(net.faulty, epoch=1)), steps(4)
    for step, fault in enumerate([Fault.LOST, 503, Fault.RESET, Fault.LATE]):
        net.proxy.faults = [fault]
        assert publisher.publish(models[step], step=step).version == step
    assert len(read_log(net.honest).records) == 4
    assert same_model(pulled(net.honest, 3), models[3])
