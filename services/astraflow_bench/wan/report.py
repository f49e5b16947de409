"""What the experiment tells: figures out of events, targets, the JSON object and the page of results.

Invariant: nothing is measured here, and every field is in docs/bench.md (a test compares). `experiment` fills it, the
command prints it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from astraflow_bench.machine import Origin
from astraflow_bench.weights.targets import Target

Figures = dict[str, Any]

LAG_OVER_SUM = 0.6
BLOCKED_OVER_NONE = 1.25


@dataclass(kw_only=True)
class WanReport:
    """Everything that was measured, section by section."""

    machine: Figures = field(default_factory=dict)
    scale: float = 1.0
    tries: list[Figures] = field(default_factory=list)
    link: Figures = field(default_factory=dict)
    store: Figures = field(default_factory=dict)
    model: Figures = field(default_factory=dict)
    publish: list[Figures] = field(default_factory=list)
    full: list[Figures] = field(default_factory=list)
    deltas: list[Figures] = field(default_factory=list)
    blocked: list[Figures] = field(default_factory=list)
    lag: list[Figures] = field(default_factory=list)
    join: list[Figures] = field(default_factory=list)
    seconds: float = 0.0

    def targets(self) -> list[Target]:
        """What the experiment holds the system to."""
        lags = [
            Target(
                f"bytes after {lag['versions']} versions / sum of the deltas, {lag['link']}",
                lag["over_sum"],
                LAG_OVER_SUM,
            )
            for lag in self.lag
        ]
        blocked = [
            Target(f"trainer blocked, {row['node']} node / no node", row["over_none"], BLOCKED_OVER_NONE)
            for row in self.blocked
            if row["node"] != "no"
        ]
        return lags + blocked

    def as_json(self) -> Figures:
        """The object that `--json` prints."""
        return asdict(self) | {"targets": [asdict(target) | {"met": target.met} for target in self.targets()]}


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One version, or one file, that came to a node."""

    seconds: float
    refresh_s: float
    advance_s: float
    fetched_bytes: int
    received_bytes: int
    snapshots: int = 0
    deltas: int = 0


def full_figures(
    link: str, method: str, arrival: Arrival, *, connections: str, rate_bits_per_s: float
) -> Figures:
    """A whole model over a link, by `new` connections or by those that are `open` already."""
    return {
        "link": link,
        "method": method,
        "connections": connections,
        "seconds": arrival.seconds,
        "fetched_bytes": arrival.fetched_bytes,
        "received_bytes": arrival.received_bytes,
        "link_share": 8 * arrival.received_bytes / arrival.seconds / rate_bits_per_s,
    }


def delta_figures(link: str, codec: str, arrivals: Sequence[Arrival], *, safetensors_s: float) -> Figures:
    """Single versions over a link, one after the other."""
    seconds = [arrival.seconds for arrival in arrivals]
    return {
        "link": link,
        "codec": codec,
        "versions": len(arrivals),
        "seconds": median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "refresh_s": median(arrival.refresh_s for arrival in arrivals),
        "advance_s": median(arrival.advance_s for arrival in arrivals),
        "fetched_bytes": round(fmean(arrival.fetched_bytes for arrival in arrivals)),
        "received_bytes": round(fmean(arrival.received_bytes for arrival in arrivals)),
        "over_safetensors": median(seconds) / safetensors_s,
    }


def blocked_figures(node: str, events: Sequence[Mapping[str, Any]], *, none_s: float | None) -> Figures:
    """How long publications held the training thread; `none_s` is the median without a node."""
    blocked_s = median(event["blocked_s"] for event in events)
    return {
        "node": node,
        "publications": len(events),
        "seconds": blocked_s,
        "most_s": max(event["blocked_s"] for event in events),
        "copy_s": median(event["copy_s"] for event in events),
        "wait_s": median(event["wait_s"] for event in events),
        "copy_cpu_s": median(event["copy_cpu_s"] for event in events),
        "over_none": 1.0 if none_s is None else blocked_s / none_s,
    }


def lag_figures(link: str, arrival: Arrival, described: Mapping[str, Any]) -> Figures:
    """A node that catches up over several versions at once."""
    sum_bytes = sum(described["delta_bytes"])
    return {
        "link": link,
        "versions": len(described["delta_bytes"]),
        "seconds": arrival.seconds,
        "fetched_bytes": arrival.fetched_bytes,
        "sum_bytes": sum_bytes,
        "over_sum": arrival.fetched_bytes / sum_bytes,
        "merged_bytes": described["merged_bytes"],
        "used_merged": described["merged_bytes"] is not None
        and arrival.deltas == 1
        and not arrival.snapshots,
    }


def join_figures(link: str, version: int, arrival: Arrival) -> Figures:
    """A node that begins with nothing at a late version."""
    return {
        "link": link,
        "version": version,
        "seconds": arrival.seconds,
        "fetched_bytes": arrival.fetched_bytes,
        "snapshots": arrival.snapshots,
        "deltas": arrival.deltas,
    }


def publish_figures(what: str, events: Sequence[Mapping[str, Any]]) -> Figures:
    """How long publications took beside training, from the end of the copy to the commit."""
    return {
        "what": what,
        "versions": len(events),
        "seconds": median(event["publish_s"] for event in events),
        "bytes": round(fmean(event["size_bytes"] for event in events)),
    }


# ---------------------------------------------------------------- pages


def tables(report: WanReport) -> list[tuple[str, list[Figures]]]:
    """Every list of figures under the title it has for people."""
    return [
        ("Publishing, beside training", report.publish),
        ("A whole model to a node", report.full),
        ("One version to a node that has the one before", report.deltas),
        ("The training thread, per publication", report.blocked),
        ("A node that slept", report.lag),
        ("A node that begins late", report.join),
        ("Targets", [asdict(target) | {"met": target.met} for target in report.targets()]),
    ]


def summary(report: WanReport) -> list[str]:
    """What was measured on what, in sentences."""
    link, model, store, machine = report.link, report.model, report.store, report.machine
    lines = [
        f"Link: {link['rate_bits_per_s'] / 1e9:g} Gbit/s, {link['rtt_s'] * 1000:g} ms round trip. Plain TCP over the "
        f"same path in the same run: {link['measured_bits_per_s'] / 1e9:.2f} Gbit/s, "
        f"{link['measured_rtt_s'] * 1000:.1f} ms, with {link['connections']} connections "
        f"({link['congestion_control']}, buffers up to {link['socket_bytes'] / 1e6:.0f} MB).",
        f"Store: {store['name']}, {store['bytes_per_s'] / 1e6:.0f} MB/s without a link.",
        f"Model: {model['bytes'] / 1e9:.2f} GB of bfloat16, of which {100 * model['density']:.2f} % change per "
        "version.",
        f"Machine: {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['kernel']}, load "
        f"{machine['load_before']:.1f} before and {machine['load_after']:.1f} after. The run took "
        f"{report.seconds:.0f} s.",
    ]
    if report.scale != 1:
        tried = ", ".join(
            f"{attempt['rate_bits_per_s'] / 1e9:g} Gbit/s carried {attempt['measured_bits_per_s'] / 1e9:.2f}"
            for attempt in report.tries
        )
        lines.insert(
            0, f"SCALED: link and model are {report.scale:g} of the nominal ones, for this machine: {tried}."
        )
    return lines


def write_page(report: WanReport, *, folder: Path, origin: Origin, command: str) -> None:
    """Write `wan.json` and `wan.md` into the folder."""
    content = {"origin": asdict(origin), "command": command, **report.as_json()}
    (folder / "wan.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        f"machine: {origin.machine}",
        f"date: {origin.date}, commit {origin.commit}",
        *summary(report),
    ]
    blocks = [
        "# Versions over a long link",
        f"Written by `{command}`; [the fields](../bench.md) are explained there and stand in `wan.json`.",
        "\n".join(f"* {line}" for line in lines),
    ]
    for name, rows in tables(report):
        if rows:
            blocks.append(f"## {name}\n\n{_markdown_table(rows)}")
    (folder / "wan.md").write_text("\n\n".join(blocks) + "\n")


def cell(value: object) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _markdown_table(rows: Sequence[Figures]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([cell(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
