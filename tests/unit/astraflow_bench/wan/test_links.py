"""The plan of the links: buffers fit the rate and the delay, and only the long link is long."""

import dataclasses

import pytest

from astraflow_bench.wan.links import LinkPlan, Place, best_congestion_control, goodput_bits_per_s, link_to

NOMINAL = LinkPlan(rate_bits_per_s=4e9, rtt_s=0.3)
PACKET_BEFORE_SEGMENTATION = 65536 + 14


def option(words: tuple[str, ...], name: str) -> str:
    """The word after `name`."""
    return words[words.index(name) + 1]


def test_what_is_on_the_way_is_rate_times_round_trip() -> None:
    assert NOMINAL.bdp_bytes == 150_000_000


@pytest.mark.parametrize("rate", [1e6, 1e9, 4e9, 40e9])
@pytest.mark.parametrize("rtt_s", [0.001, 0.06, 0.3])
def test_buffers_hold_what_is_on_the_way(rate: float, rtt_s: float) -> None:
    plan = LinkPlan(rate_bits_per_s=rate, rtt_s=rtt_s)
    one_way = plan.bdp_bytes // 2
    assert plan.ring_bytes > one_way
    assert plan.socket_bytes >= 2 * plan.bdp_bytes, "the kernel lends half of a buffer to payload"


@pytest.mark.parametrize("place", [Place.TRAINER, Place.LOCAL, Place.REMOTE])
@pytest.mark.parametrize("rate", [1e6, 1e9, 4e9])
def test_a_link_has_its_rate_and_room_for_whole_packets(place: Place, rate: float) -> None:
    plan = LinkPlan(rate_bits_per_s=rate, rtt_s=0.3)
    link = link_to(plan, place)
    words = plan.shaping(link)
    assert option(words, "dev") == link.device
    assert option(words, "rate") == f"{int(rate)}bit"
    assert int(option(words, "burst")) >= PACKET_BEFORE_SEGMENTATION
    assert int(option(words, "limit")) > int(option(words, "burst"))


def test_only_the_remote_node_is_far_away() -> None:
    delays = {link.place: link.delay_us for link in NOMINAL.links}
    assert delays == {Place.TRAINER: 0, Place.LOCAL: 0, Place.REMOTE: 150_000}


def test_no_two_links_share_a_device_or_an_address() -> None:
    links = NOMINAL.links
    assert len({link.device for link in links}) == len(links)
    addresses = {link.address for link in links} | {link.store_address for link in links}
    assert len(addresses) == 2 * len(links)


def test_scaling_keeps_the_round_trip() -> None:
    assert dataclasses.asdict(NOMINAL.scaled(0.25)) == {"rate_bits_per_s": 1e9, "rtt_s": 0.3}


def test_headers_take_their_share() -> None:
    assert 0.96 < goodput_bits_per_s(1.0) < 0.97


def test_bbr_is_taken_where_the_kernel_has_it() -> None:
    assert best_congestion_control(["reno", "bbr", "cubic"]) == "bbr"
    assert best_congestion_control(["reno", "cubic"]) == "cubic"
