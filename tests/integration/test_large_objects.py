"""How an S3 store sends and reads large objects over a network that fails: piece by piece, range by range."""

import dataclasses
import random

import pytest

from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import ObjectNotFound, Unavailable
from astraflow_weights.store import PutResult
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.manifest import PartRef
from support.store_proxy import Fault
from support.weight_fixtures import BadNetwork

pytestmark = pytest.mark.integration

MIB = 2**20
CONTENT = random.Random(0).randbytes(11 * MIB + 7)
KEY = f"run/policy/parts/{sha256(CONTENT).hex()}.afwd"
SMALLEST = {"multipart_threshold_bytes": 5 * MIB, "multipart_piece_bytes": 5 * MIB, "range_bytes": 4 * MIB}
ONE_BY_ONE = SMALLEST | {"transfer_threads": 1}
"""So that the order of requests is known."""
WATCHED = {"progress_bytes": 2**13, "progress_window_s": 0.5}
FINISH = ".afwd?uploadId="
"""In the path of the request that ends an upload, and of no other."""


@pytest.fixture
def net(net: BadNetwork) -> BadNetwork:
    """Three attempts patient, one request at a time."""
    return dataclasses.replace(net, faulty=net.behind(**ONE_BY_ONE))


@pytest.fixture
def hasty(net: BadNetwork) -> BadNetwork:
    """The same, and it waits for nothing long; on a busy machine it may cut also what is merely slow."""
    return dataclasses.replace(
        net, faulty=net.behind(**ONE_BY_ONE, **WATCHED, read_timeout_s=0.8, max_attempts=20)
    )


def send(net: BadNetwork, where: str, fault: Fault | int) -> list[str]:
    """Upload the content, where one request meets a fault; the methods of all requests."""
    net.proxy.only, net.proxy.faults = where, [fault]
    assert net.faulty.put_if_absent(KEY, CONTENT) is PutResult.CREATED
    assert net.proxy.faults == []
    assert net.honest.get(KEY) == CONTENT
    return [method for method, _ in net.proxy.requests]


PIECE_FAULTS = [500, 503, 429, Fault.RESET, Fault.LOST, Fault.GARBAGE]


@pytest.mark.parametrize("fault", PIECE_FAULTS, ids=str)
def test_only_the_piece_that_failed_is_sent_again(net: BadNetwork, fault: Fault | int) -> None:
    assert send(net, "partNumber=2", fault).count("PUT") == 4
    assert net.unfinished() == 0


@pytest.mark.parametrize("fault", [500, Fault.RESET, Fault.LOST, Fault.GARBAGE], ids=str)
def test_the_end_of_an_upload_is_settled_by_looking(net: BadNetwork, fault: Fault | int) -> None:
    send(net, FINISH, fault)
    assert net.unfinished() == 0


def test_an_upload_that_the_service_forgot_is_begun_anew(net: BadNetwork) -> None:
    assert send(net, "partNumber=3", 404).count("PUT") == 6


def test_an_upload_that_keeps_failing_leaves_nothing(net: BadNetwork) -> None:
    net.proxy.only, net.proxy.faults = "partNumber=2", [503] * 3
    with pytest.raises(Unavailable, match="failed 3 times"):
        net.faulty.put_if_absent(KEY, CONTENT)
    with pytest.raises(ObjectNotFound):
        net.honest.head(KEY)
    assert net.unfinished() == 0


def test_pieces_that_cannot_be_given_up_are_named_in_the_error(net: BadNetwork) -> None:
    net.proxy.only, net.proxy.faults = "uploadId=", [None] * 3 + [503] * 4
    with pytest.raises(Unavailable) as raised:
        net.faulty.put_if_absent(KEY, CONTENT)
    assert "stay until the bucket's rules remove them" in raised.value.__notes__[0]


def test_a_small_create_that_the_service_takes_in_sips_is_cut_and_tried_again(net: BadNetwork) -> None:
    net.proxy.faults = [Fault.SIP]
    store = net.behind(max_attempts=20, **WATCHED)
    assert store.put_if_absent("key", CONTENT) is PutResult.CREATED
    assert [method for method, _ in net.proxy.requests][:2] == ["PUT", "PUT"]
    assert net.honest.get("key") == CONTENT


RANGE_FAULTS = [500, 503, 429, Fault.RESET, Fault.LOST, Fault.CUT, Fault.GARBAGE]


@pytest.mark.parametrize("fault", RANGE_FAULTS, ids=str)
def test_only_the_range_that_failed_is_read_again(net: BadNetwork, fault: Fault | int) -> None:
    net.honest.put_if_absent(KEY, CONTENT)
    net.proxy.faults = [None, fault]
    assert net.faulty.get(KEY) == CONTENT
    assert net.proxy.faults == []
    assert len(net.proxy.requests) == 4


def test_a_transfer_that_never_gets_on_ends_as_unavailable(net: BadNetwork) -> None:
    net.honest.put_if_absent(KEY, CONTENT)
    net.proxy.faults = [Fault.DRIP] * 3
    too_slow = r"failed 3 times, last: \d+ bytes moved in .* less than 8192 in 0\.5 s"
    with pytest.raises(Unavailable, match=too_slow):
        net.behind(**WATCHED).get(KEY)


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.LATE, Fault.DRIP], ids=str)
def test_a_range_that_stands_still_is_cut_and_read_again(hasty: BadNetwork, fault: Fault) -> None:
    hasty.honest.put_if_absent(KEY, CONTENT)
    hasty.proxy.faults = [None, fault]
    assert hasty.faulty.get(KEY) == CONTENT
    assert len(hasty.proxy.requests) >= 4


@pytest.mark.parametrize(
    ("where", "fault"),
    [("partNumber=2", Fault.STALL), ("partNumber=2", Fault.SIP), (FINISH, Fault.LATE)],
    ids=str,
)
def test_an_upload_that_stands_still_is_cut_and_goes_on(hasty: BadNetwork, where: str, fault: Fault) -> None:
    send(hasty, where, fault)


def test_a_wrong_byte_in_one_range_is_seen_and_the_part_is_fetched_again(net: BadNetwork) -> None:
    net.honest.put_if_absent(KEY, CONTENT)
    net.proxy.faults = [None, Fault.WRONG]
    ref = PartRef(key=KEY, size_bytes=len(CONTENT), sha256=sha256(CONTENT))
    assert fetch_part(net.faulty, ref) == CONTENT
    assert len(net.proxy.requests) == 6


def test_an_object_that_is_replaced_between_two_ranges_is_read_again_from_the_beginning(
    net: BadNetwork,
) -> None:
    net.honest.put("hint", CONTENT)
    other = bytes(reversed(CONTENT))
    net.proxy.before_request = lambda number: net.honest.put("hint", other) if number == 2 else None
    assert net.faulty.get("hint") == other


def test_a_cache_that_knows_no_ranges_does_no_harm(net: BadNetwork) -> None:
    net.honest.put_if_absent(KEY, CONTENT)
    net.proxy.knows_ranges = False
    assert net.faulty.get(KEY) == CONTENT
    assert net.faulty.get_range(KEY, start=MIB, length=6 * MIB) == CONTENT[MIB : 7 * MIB]
