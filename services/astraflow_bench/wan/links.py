"""What the links of the experiment are: rates, delays, buffers, addresses.

Invariant: pure. The store is the middle: a short link each to the publisher and the local node, and a long one to the
remote node. `network` builds what is planned here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_MTU = 1500
_MIB = 2**20
# Enough for the scheduler of a busy machine to be late by some milliseconds without a loss of rate.
_BURST_S = 0.002
_SHORT_RTT_S = 0.02
"""For sizes of queues: what a short link may hold."""
RATE_SHARE = 0.9
"""Of the nominal rate, what a raw TCP transfer must reach before anything is measured."""
SCALES = (1.0, 0.5, 0.25, 0.125)
"""Tried in turn, link and model together, until the machine carries the link."""


class Place(Enum):
    """A network namespace, and who works there."""

    STORE = "store"
    TRAINER = "trainer"
    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between the store and one other place. Both ends have a device of the same name."""

    place: Place
    device: str
    store_address: str
    address: str
    delay_us: int
    """One way; 0: a plain pair of devices without a relay."""


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """All links: one rate, and the round trip of the long one."""

    rate_bits_per_s: float
    rtt_s: float

    @property
    def bdp_bytes(self) -> int:
        """Bytes in flight when the long link is full."""
        return int(self.rate_bits_per_s / 8 * self.rtt_s)

    @property
    def ring_bytes(self) -> int:
        """Memory of the relay per direction: half of what is in flight, and as much again for bursts."""
        return self.bdp_bytes + 32 * _MIB

    @property
    def socket_bytes(self) -> int:
        """Bound of a socket's buffers, so that one connection alone could fill the long link."""
        return max(16 * _MIB, 4 * self.bdp_bytes)

    @property
    def links(self) -> tuple[Link, ...]:
        """The short links, then the long one."""
        delay_us = int(self.rtt_s / 2 * 1e6)
        return (
            _link(Place.TRAINER, "lan1", 1, 0),
            _link(Place.LOCAL, "lan2", 2, 0),
            _link(Place.REMOTE, "wan", 3, delay_us),
        )

    def shaping(self, link: Link) -> tuple[str, ...]:
        """Arguments of `tc` that give a device of the link its rate."""
        bytes_per_s = self.rate_bits_per_s / 8
        # Room for a few packets before segmentation, or the queue would cut them into small ones.
        burst = max(256 * 1024, int(bytes_per_s * _BURST_S))
        held = bytes_per_s * (self.rtt_s if link.delay_us else _SHORT_RTT_S) / 4
        limit = burst + max(2 * _MIB, int(held))
        rate = f"{int(self.rate_bits_per_s)}bit"
        return (
            *("qdisc", "replace", "dev", link.device, "root", "tbf"),
            *("rate", rate, "burst", str(burst), "limit", str(limit)),
        )

    def tuning(self, *, congestion_control: str) -> tuple[tuple[str, str], ...]:
        """What hosts at the ends of such a link set, by name below /proc/sys."""
        buffers = f"4096 131072 {self.socket_bytes}"
        return (
            ("net/ipv4/tcp_rmem", buffers),
            ("net/ipv4/tcp_wmem", buffers),
            ("net/ipv4/tcp_congestion_control", congestion_control),
        )

    def scaled(self, scale: float) -> "LinkPlan":
        """The same links at a share of the rate."""
        return LinkPlan(rate_bits_per_s=self.rate_bits_per_s * scale, rtt_s=self.rtt_s)


def link_to(plan: LinkPlan, place: Place) -> Link:
    """The link between the store and `place`."""
    return next(link for link in plan.links if link.place is place)


def goodput_bits_per_s(rate_bits_per_s: float) -> float:
    """What a link of this rate can carry of TCP's payload: 52 bytes of each packet are headers."""
    return rate_bits_per_s * (_MTU - 52) / _MTU


def best_congestion_control(available: Sequence[str]) -> str:
    """BBR where there is one, for a long link with a short queue; else CUBIC, which every kernel has."""
    return "bbr" if "bbr" in available else "cubic"


def _link(place: Place, device: str, number: int, delay_us: int) -> Link:
    # Addresses that are set aside for benchmarks of networks.
    network = f"198.18.{number}"
    return Link(
        place=place,
        device=device,
        store_address=f"{network}.1",
        address=f"{network}.2",
        delay_us=delay_us,
    )
