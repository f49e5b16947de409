"""JSON has the contract's fields by fixed rules; figures are told as people say them."""

import io
import json
import math
import re
import unicodedata

import pytest
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from astraflow.commands.wording import (
    Printable,
    as_json,
    count_text,
    number_text,
    print_json,
    printable,
    span_text,
    sparkline,
    table,
    terminal,
)
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import run_pb2, version_pb2
from support.hostile_texts import HOSTILE, PICTURED


def test_json_has_every_field_of_the_message_and_null_where_nothing_is_set() -> None:
    assert set(as_json(pb.StatusResponse())) == {field.name for field in pb.StatusResponse.DESCRIPTOR.fields}
    assert as_json(pb.PolicyStatus())["version"] is None


def test_each_kind_of_value_has_its_form() -> None:
    wait = pb.Wait(stage="lease", policy_id="solver")
    wait.waited_duration.FromMilliseconds(1500)
    node = pb.NodeStatus(node_id="n", serving_versions={"solver": 3})
    node.last_seen_time.FromSeconds(0)
    version = version_pb2.Version(version=2**60, manifest_sha256=b"\x01\xff")
    status = pb.StatusResponse(
        state=run_pb2.RUN_STATE_FINISHING,
        waits=[wait],
        nodes=[node],
        policies=[pb.PolicyStatus(version=version, recent_training_reward=math.nan)],
    )
    told = as_json(status)
    (wait_told,), (node_told,), (policy_told,) = told["waits"], told["nodes"], told["policies"]
    assert (told["state"], wait_told["waited_s"]) == ("finishing", 1.5)
    assert "waited_duration" not in wait_told
    assert node_told["serving_versions"] == {"solver": 3}
    assert node_told["last_seen_time"] == "1970-01-01T00:00:00Z"
    version_told = policy_told["version"]
    assert (version_told["version"], version_told["manifest_sha256"]) == (2**60, "01ff")
    assert policy_told["recent_training_reward"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (4.26, "4.3 s"), (75, "75 s"), (245, "4 min 05 s"), (9000, "2 h 30 min")],
)
def test_a_length_of_time_is_told_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_figures() -> None:
    assert count_text(1234567) == "1,234,567"
    assert number_text(0.5) == "0.500"
    assert number_text(math.nan) == "–"


def test_a_sparkline_spans_its_range_and_leaves_gaps() -> None:
    assert sparkline([0.0, 0.5, 1.0, math.nan, 2.0]) == "▁▅█ █"
    assert sparkline([1.0] * 100, width=3) == "███"


MARKS = "\u061c\u200e\u200f"


def test_what_would_act_on_a_terminal_is_a_picture() -> None:
    assert printable(HOSTILE) == PICTURED
    assert printable("two\nlines\tand more\x07") == "two\nlines\tand more␇"


def test_json_says_the_same_and_acts_on_no_screen(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({HOSTILE: [HOSTILE, "é"]})
    document = capsys.readouterr().out
    assert json.loads(document) == {HOSTILE: [HOSTILE, "é"]}
    assert printable(document) == document
    assert "é" in document


def test_every_character_that_turns_text_or_breaks_a_line_is_a_picture() -> None:
    acting = [chr(code) for code in range(0x110000) if acts(chr(code))]
    assert len(acting) > 40
    assert [hex(ord(each)) for each in acting if printable(each) == each] == []


def acts(character: str) -> bool:
    """By the Unicode database: a control, what decides a direction, or what separates lines."""
    directions = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    kind = unicodedata.category(character)
    return character not in "\t\n" and (
        kind in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(character) in directions or character in MARKS
    )


def cell(text: str) -> Table:
    """A table of one cell."""
    rows = table("what")
    rows.add_row(text)
    return rows


@pytest.mark.parametrize("shown", [Text(HOSTILE, style="red"), cell(HOSTILE), HOSTILE], ids=type)
def test_nothing_that_is_shown_acts_on_the_terminal(shown: RenderableType) -> None:
    plain = terminal(file=io.StringIO(), width=60)
    plain.print(shown)
    # A cell is broken there, as at a line feed, and stays a cell.
    assert PICTURED.replace("␤", "") in re.sub(r"␤|\s", "", printed(plain))
    assert "\x1b" not in printed(plain)
    screen = Console(file=io.StringIO(), force_terminal=True, highlight=False, width=60)
    with Live(Printable(shown), console=screen, auto_refresh=False):
        pass
    assert PICTURED.partition("␤")[0] in printed(screen)
    assert [part for part in ("\x1b]0;", "\x1b[2J", "\x9b") if part in printed(screen)] == []


def printed(console: Console) -> str:
    """What came out of a console that prints into memory."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
