"""How an S3 store sends and reads large objects over a network that fails: piece by piece, range by range."""

import random
from collections.abc import Callable

import pytest

from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import ObjectNotFound, Unavailable
from astraflow_weights.store import ObjectStore, PutResult, open_store
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.manifest import PartRef
from support.s3_server import S3Server
from support.store_proxy import Fault, StoreProxy

pytestmark = pytest.mark.integration

MIB = 2**20
CONTENT = random.Random(0).randbytes(11 * MIB + 7)
Unfinished = Callable[[], int]
KEY = f"run/policy/parts/{sha256(CONTENT).hex()}.afwd"
SMALLEST = {"multipart_threshold_bytes": 5 * MIB, "multipart_piece_bytes": 5 * MIB, "range_bytes": 4 * MIB}
# One at a time, so that the order of requests is known.
ONE_BY_ONE = SMALLEST | {"transfer_threads": 1}
WATCHED = {"progress_bytes": 2**13, "progress_window_s": 0.5}
FINISH = ".afwd?uploadId="
"""In the path of the request that ends an upload, and of no other."""


@pytest.fixture
def faulty(proxy: StoreProxy, s3_server: S3Server, bucket: str) -> ObjectStore:
    """A store behind the proxy, three attempts patient."""
    return open_store(f"s3://{bucket}", settings=s3_server.settings(endpoint_url=proxy.url, **ONE_BY_ONE))


@pytest.fixture
def impatient(proxy: StoreProxy, s3_server: S3Server, bucket: str) -> ObjectStore:
    """The same, and it waits for nothing long; on a busy machine it may cut also what is merely slow."""
    hasty: dict[str, float] = {"read_timeout_s": 0.8, "max_attempts": 20}
    settings = s3_server.settings(endpoint_url=proxy.url, **ONE_BY_ONE, **WATCHED, **hasty)
    return open_store(f"s3://{bucket}", settings=settings)


@pytest.fixture
def honest(s3_server: S3Server, bucket: str) -> ObjectStore:
    """The same store without the proxy."""
    return open_store(f"s3://{bucket}", settings=s3_server.settings(**SMALLEST))


@pytest.fixture
def unfinished(s3_server: S3Server, bucket: str) -> Unfinished:
    """Counts uploads that were begun and neither ended nor given up."""

    def count() -> int:
        client = s3_server.client()
        uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        client.close()
        return len(uploads)

    return count


PIECE_FAULTS = [500, 503, 429, Fault.RESET, Fault.LOST, Fault.GARBAGE]


@pytest.mark.parametrize("fault", PIECE_FAULTS, ids=str)
def test_only_the_piece_that_failed_is_sent_again(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy, unfinished: Unfinished, fault: Fault | int
) -> None:
    proxy.only, proxy.faults = "partNumber=2", [fault]
    assert faulty.put_if_absent(KEY, CONTENT) is PutResult.CREATED
    assert proxy.faults == []
    assert honest.get(KEY) == CONTENT
    assert [method for method, _ in proxy.requests].count("PUT") == 4
    assert unfinished() == 0


@pytest.mark.parametrize("fault", [500, Fault.RESET, Fault.LOST, Fault.GARBAGE], ids=str)
def test_the_end_of_an_upload_is_settled_by_looking(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy, unfinished: Unfinished, fault: Fault | int
) -> None:
    proxy.only, proxy.faults = FINISH, [fault]
    assert faulty.put_if_absent(KEY, CONTENT) is PutResult.CREATED
    assert proxy.faults == []
    assert honest.get(KEY) == CONTENT
    assert unfinished() == 0


def test_an_upload_that_the_service_forgot_is_begun_anew(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy
) -> None:
    proxy.only, proxy.faults = "partNumber=3", [404]
    assert faulty.put_if_absent(KEY, CONTENT) is PutResult.CREATED
    assert honest.get(KEY) == CONTENT
    assert [method for method, _ in proxy.requests].count("PUT") == 6


def test_an_upload_that_keeps_failing_leaves_nothing(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy, unfinished: Unfinished
) -> None:
    proxy.only, proxy.faults = "partNumber=2", [503] * 3
    with pytest.raises(Unavailable, match="failed 3 times"):
        faulty.put_if_absent(KEY, CONTENT)
    with pytest.raises(ObjectNotFound):
        honest.head(KEY)
    assert unfinished() == 0


def test_pieces_that_cannot_be_given_up_are_named_in_the_error(
    faulty: ObjectStore, proxy: StoreProxy
) -> None:
    proxy.only, proxy.faults = "uploadId=", [None] * 3 + [503] * 4
    with pytest.raises(Unavailable) as raised:
        faulty.put_if_absent(KEY, CONTENT)
    assert "stay until the bucket's rules remove them" in raised.value.__notes__[0]


def test_a_small_create_that_the_service_takes_in_sips_is_cut_and_tried_again(
    s3_server: S3Server, bucket: str, honest: ObjectStore, proxy: StoreProxy
) -> None:
    settings = s3_server.settings(endpoint_url=proxy.url, max_attempts=20, **WATCHED)
    proxy.faults = [Fault.SIP]
    assert open_store(f"s3://{bucket}", settings=settings).put_if_absent("key", CONTENT) is PutResult.CREATED
    assert [method for method, _ in proxy.requests][:2] == ["PUT", "PUT"]
    assert honest.get("key") == CONTENT


RANGE_FAULTS = [500, 503, 429, Fault.RESET, Fault.LOST, Fault.CUT, Fault.GARBAGE]


@pytest.mark.parametrize("fault", RANGE_FAULTS, ids=str)
def test_only_the_range_that_failed_is_read_again(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy, fault: Fault | int
) -> None:
    honest.put_if_absent(KEY, CONTENT)
    proxy.faults = [None, fault]
    assert faulty.get(KEY) == CONTENT
    assert proxy.faults == []
    assert len(proxy.requests) == 4


def test_a_transfer_that_never_gets_on_ends_as_unavailable(
    s3_server: S3Server, bucket: str, honest: ObjectStore, proxy: StoreProxy
) -> None:
    honest.put_if_absent(KEY, CONTENT)
    proxy.faults = [Fault.DRIP] * 3
    settings = s3_server.settings(endpoint_url=proxy.url, **WATCHED)
    with pytest.raises(
        Unavailable, match=r"failed 3 times, last: \d+ bytes moved in .* less than 8192 in 0\.5 s"
    ):
        open_store(f"s3://{bucket}", settings=settings).get(KEY)


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.LATE, Fault.DRIP], ids=str)
def test_a_range_that_stands_still_is_cut_and_read_again(
    impatient: ObjectStore, honest: ObjectStore, proxy: StoreProxy, fault: Fault
) -> None:
    honest.put_if_absent(KEY, CONTENT)
    proxy.faults = [None, fault]
    assert impatient.get(KEY) == CONTENT
    assert len(proxy.requests) >= 4


@pytest.mark.parametrize(
    ("where", "fault"),
    [("partNumber=2", Fault.STALL), ("partNumber=2", Fault.SIP), (FINISH, Fault.LATE)],
    ids=str,
)
def test_an_upload_that_stands_still_is_cut_and_goes_on(
    impatient: ObjectStore, honest: ObjectStore, proxy: StoreProxy, where: str, fault: Fault
) -> None:
    proxy.only, proxy.faults = where, [fault]
    assert impatient.put_if_absent(KEY, CONTENT) is PutResult.CREATED
    assert proxy.faults == []
    assert honest.get(KEY) == CONTENT


def test_a_wrong_byte_in_one_range_is_seen_and_the_part_is_fetched_again(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy
) -> None:
    honest.put_if_absent(KEY, CONTENT)
    proxy.faults = [None, Fault.WRONG]
    ref = PartRef(key=KEY, size_bytes=len(CONTENT), sha256=sha256(CONTENT))
    assert fetch_part(faulty, ref) == CONTENT
    assert len(proxy.requests) == 6


def test_an_object_that_is_replaced_between_two_ranges_is_read_again_from_the_beginning(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy
) -> None:
    honest.put("hint", CONTENT)
    other = bytes(reversed(CONTENT))
    proxy.before_request = lambda number: honest.put("hint", other) if number == 2 else None
    assert faulty.get("hint") == other


def test_a_cache_that_knows_no_ranges_does_no_harm(
    faulty: ObjectStore, honest: ObjectStore, proxy: StoreProxy
) -> None:
    honest.put_if_absent(KEY, CONTENT)
    proxy.knows_ranges = False
    assert faulty.get(KEY) == CONTENT
    assert faulty.get_range(KEY, start=MIB, length=6 * MIB) == CONTENT[MIB : 7 * MIB]
