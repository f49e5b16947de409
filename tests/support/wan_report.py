"""A report of the WAN experiment without an experiment, made by the functions that make a real one."""

from typing import Any

from astraflow_bench.wan import report
from astraflow_bench.wan.report import Arrival, WanReport

ARRIVAL = Arrival(
    seconds=1.0, refresh_s=0.2, advance_s=0.8, fetched_bytes=1000, received_bytes=1100, snapshots=0, deltas=1
)


def blocked_event(seconds: float) -> dict[str, Any]:
    """What the trainer says of one publication."""
    return {"blocked_s": seconds, "copy_s": seconds, "wait_s": 0.0, "copy_cpu_s": seconds}


def made_report(*, blocked_s: float = 1.0, over_none: float = 1.0, over_sum: float = 0.5) -> WanReport:
    """Every section once; sections that `experiment` writes itself have its fields."""
    published = {"publish_s": 1.0, "size_bytes": 10}
    described = {"delta_bytes": [ARRIVAL.fetched_bytes / over_sum], "merged_bytes": ARRIVAL.fetched_bytes}
    return WanReport(
        machine=dict.fromkeys(("cores", "memory_bytes", "load_before", "load_after"), 1)
        | {"kernel": "Linux"},
        tries=[{"rate_bits_per_s": 1e9, "measured_bits_per_s": 1e9}],
        link=dict.fromkeys(
            (
                *("rate_bits_per_s", "goodput_bits_per_s", "rtt_s", "measured_bits_per_s", "measured_rtt_s"),
                *("connections", "bdp_bytes", "socket_bytes", "latest_us", "refused_packets"),
            ),
            1,
        )
        | {"congestion_control": "bbr"},
        store={"name": "store", "bytes_per_s": 1.0},
        model=dict.fromkeys(("bytes", "num_elements", "trained_elements", "learning_rate", "density"), 1),
        publish=[report.publish_figures("rice", [published])],
        full=[report.full_figures("local", "version", ARRIVAL, connections="new", rate_bits_per_s=1e9)],
        deltas=[report.delta_figures("local", "rice", [ARRIVAL], safetensors_s=1.0)],
        blocked=[
            report.blocked_figures("no", [blocked_event(blocked_s)], none_s=None),
            report.blocked_figures("remote", [blocked_event(blocked_s * over_none)], none_s=blocked_s),
        ],
        lag=[report.lag_figures("remote", ARRIVAL, described)],
        join=[report.join_figures("remote", 50, ARRIVAL)],
    )
