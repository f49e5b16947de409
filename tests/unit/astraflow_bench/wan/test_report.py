"""Figures of the WAN experiment: medians, ratios, targets, and a page that documents every field."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow_bench import machine, wan
from astraflow_bench.wan.report import Arrival, WanReport, delta_figures
from support.source_tree import REPOSITORY
from support.wan_report import blocked_event, made_report


def arrival(seconds: float, *, fetched: int = 100, deltas: int = 1, **more: int) -> Arrival:
    counts = {"fetched_bytes": fetched, "received_bytes": fetched + 10, "deltas": deltas, **more}
    return Arrival(seconds=seconds, refresh_s=seconds / 4, advance_s=seconds / 2, **counts)


def test_times_are_medians_and_bytes_are_means() -> None:
    arrivals = [arrival(1.0, fetched=10), arrival(9.0, fetched=20), arrival(2.0, fetched=60)]
    figures = delta_figures("remote", "rice", arrivals, safetensors_s=4.0)
    assert (figures["seconds"], figures["least_s"], figures["most_s"]) == (2.0, 1.0, 9.0)
    assert (figures["fetched_bytes"], figures["received_bytes"]) == (30, 40)
    assert figures["over_safetensors"] == 0.5


def test_a_whole_model_is_measured_against_the_rate() -> None:
    figures = wan.report.full_figures(
        "remote", "version", arrival(2.0, fetched=990), connections="open", rate_bits_per_s=8000.0
    )
    assert figures["link_share"] == 0.5


@pytest.mark.parametrize(
    ("found", "merged", "used"),
    [
        (arrival(1.0, fetched=40), 40, True),
        (arrival(1.0, fetched=80, deltas=8), 40, False),
        (arrival(1.0, fetched=90, snapshots=1, deltas=0), 40, False),
        (arrival(1.0, fetched=40), None, False),
    ],
)
def test_a_merged_delta_is_used_if_it_came_alone(found: Arrival, merged: int | None, *, used: bool) -> None:
    figures = wan.report.lag_figures("local", found, {"delta_bytes": [10] * 8, "merged_bytes": merged})
    assert figures["used_merged"] is used
    assert figures["over_sum"] == found.fetched_bytes / 80


def test_the_trainer_is_compared_with_one_that_nobody_follows() -> None:
    alone = wan.report.blocked_figures("no", [blocked_event(0.1), blocked_event(0.3)], none_s=None)
    followed = wan.report.blocked_figures("remote", [blocked_event(0.3)], none_s=alone["seconds"])
    assert alone["over_none"] == 1.0
    assert followed["over_none"] == pytest.approx(1.5)


def test_a_target_that_is_missed_is_named() -> None:
    found = made_report(blocked_s=1.0, over_none=2.0, over_sum=0.5)
    missed = [target.name for target in found.targets() if not target.met]
    assert missed == ["trainer blocked, remote node / no node"]


def test_a_scaled_run_says_so_first() -> None:
    found = made_report()
    assert not wan.report.summary(found)[0].startswith("SCALED")
    found.scale = 0.5
    assert wan.report.summary(found)[0].startswith("SCALED")


def test_the_page_has_every_table_and_the_object_beside_it(tmp_path: Path) -> None:
    origin = machine.Origin(machine="a machine", date="2026-01-01", commit="abc")
    wan.report.write_page(made_report(), folder=tmp_path, origin=origin, command="astraflow bench wan")
    page = (tmp_path / "wan.md").read_text()
    assert "a machine" in page
    assert json.loads((tmp_path / "wan.json").read_text())["origin"]["commit"] == "abc"
    assert all(f"## {title}\n" in page for title, _ in wan.report.tables(WanReport()))


def test_every_field_is_documented_and_no_other() -> None:
    emitted = set(fields_of(made_report().as_json()))
    documented = set(documented_fields())
    assert emitted == documented, (
        f"not in docs/bench.md: {emitted - documented}; gone: {documented - emitted}"
    )


def fields_of(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Names as the page writes them: `section.field`, `list[].field`."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from fields_of(inner, f"{prefix}{name}.")
        elif isinstance(inner, list):
            yield from fields_of(inner[0], f"{prefix}{name}[].")
        else:
            yield prefix + name


def documented_fields() -> Iterator[str]:
    """Of the table in the section; names after the first of a row belong to that one's part of the object."""
    page = (REPOSITORY / "docs/bench.md").read_text()
    section_at = page.index("## Versions over a long link")
    for row in page[page.index("| field |", section_at) :].splitlines()[2:]:
        if not row.startswith("|"):
            return
        section = ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            if "." in name:
                section = name[: name.index(".") + 1]
                yield name
            else:
                yield section + name
