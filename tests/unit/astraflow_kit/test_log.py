"""Log lines: form, correlation, redaction."""

import asyncio
import io
import json
import logging
import re
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow_kit import log
from astraflow_launcher.support import archive
from support.hostile_texts import HOSTILE
from support.regex_steps import search_steps

PIECES = [
    "a",
    "é",
    "-",
    "_",
    ".",
    "/",
    "://",
    ":",
    "@",
    "=",
    "&",
    " ",
    '"',
    "eyJ",
    "-eyJ",
    "eyJhbGciOi.",
    "af1.",
    "-af1.",
]
PIECES += ["bearer", "Bearer ", "X-Amz-Signature=", "token", "api_key", "secret=", "redis://u:", "\n"]
MAX_STEPS_PER_CHARACTER = 80


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    log.configure("dataflow", log_format="json", stream=stream)
    return stream


def _written(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_service_level_and_time(lines: io.StringIO) -> None:
    log.get_logger("astraflow_x.y").info("trajectory.admitted", num_tokens=812)
    (line,) = _written(lines)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "trajectory.admitted",
        "num_tokens": 812,
        "service": "dataflow",
        "level": "info",
        "logger": "astraflow_x.y",
    }


def test_a_logger_made_before_configure_follows_it() -> None:
    early = log.get_logger("early")
    stream = io.StringIO()
    log.configure("raas", log_format="json", stream=stream)
    early.warning("lease.lost")
    assert _written(stream)[0]["service"] == "raas"


def test_levels_below_the_chosen_one_are_not_written() -> None:
    stream = io.StringIO()
    log.configure("raas", level="warning", log_format="json", stream=stream)
    log.get_logger("x").info("lease.taken")
    log.get_logger("x").warning("lease.lost")
    assert [line["event"] for line in _written(stream)] == ["lease.lost"]


def test_console_text_is_chosen_on_request() -> None:
    stream = io.StringIO()
    log.configure("raas", log_format="console", stream=stream)
    log.get_logger("x").info("lease.taken")
    assert "lease.taken" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_other_libraries_lines_get_the_same_form_and_redaction(lines: io.StringIO) -> None:
    logging.getLogger("botocore").warning("calling with %s", "Authorization: Bearer abc.def")
    (line,) = _written(lines)
    assert line["event"] == "calling with Authorization: Bearer ***"
    assert line["service"] == "dataflow"


async def test_ids_follow_the_work_into_tasks_and_end_with_it(lines: io.StringIO) -> None:
    logger = log.get_logger("x")

    async def inner() -> None:
        logger.info("episode.finished")

    with log.correlated(run_id="r", task_id="t"):
        await asyncio.create_task(inner())
    logger.info("node.idle")
    first, second = _written(lines)
    assert (first["run_id"], first["task_id"]) == ("r", "t")
    assert "run_id" not in second


def test_an_unknown_correlation_id_is_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'task_id'"):
        log.bind(taskid="t")


def test_an_exception_is_written_without_its_secrets(lines: io.StringIO) -> None:
    try:
        raise OSError("cannot reach redis://user:hunter2@10.0.0.1:6379/0")
    except OSError:
        log.get_logger("x").exception("redis.lost")
    text = lines.getvalue()
    assert "hunter2" not in text
    assert "redis://user:***@10.0.0.1" in text


@pytest.mark.parametrize(
    "key", ["token", "hf_token", "password", "api_key", "api-key", "Authorization", "aws_secret_access_key"]
)
def test_secret_keys_are_blanked_at_any_depth(lines: io.StringIO, key: str) -> None:
    log.get_logger("x").info("node.joined", settings={"inner": [{key: "hunter2"}]}, **{key: "hunter2"})
    assert "hunter2" not in lines.getvalue()


@pytest.mark.parametrize("key", ["num_tokens", "tokens_per_s", "token_ids", "tokenizer", "key"])
def test_the_words_of_the_trade_are_not_secrets(lines: io.StringIO, key: str) -> None:
    log.get_logger("x").info("episode.finished", **{key: 5})
    assert _written(lines)[0][key] == 5


@given(st.from_regex(r"[A-Za-z0-9._~+=-]{6,80}", fullmatch=True))
def test_no_bearer_token_and_no_url_password_survives(secret: str) -> None:
    event = log.redact(None, "info", {"a": f"sent Bearer {secret} to s3://u:{secret}@host/x"})
    assert event == {"a": "sent Bearer *** to s3://u:***@host/x"}


@pytest.mark.parametrize(
    "pattern", [*log.PATTERNS, *archive.PATTERNS], ids=lambda pattern: pattern.pattern[:16]
)
@given(
    before=st.sampled_from(PIECES),
    unit=st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join),
)
@settings(max_examples=60, deadline=None)
def test_the_search_for_secrets_takes_steps_in_proportion_to_the_text(
    pattern: re.Pattern[str], before: str, unit: str
) -> None:
    text = before + unit * (600 // len(unit))
    assert search_steps(pattern, text) <= MAX_STEPS_PER_CHARACTER * len(text)


@pytest.mark.parametrize("slow", [r"[a-z0-9+]+://", r"\beyJ[\w-]{8,}\."])
def test_the_count_of_steps_tells_a_slow_pattern(slow: str) -> None:
    text = "-eyJ" * 150 if "eyJ" in slow else "a" * 600
    assert search_steps(re.compile(slow), text) > MAX_STEPS_PER_CHARACTER * len(text)


def test_a_long_text_is_cut_with_a_mark(lines: io.StringIO) -> None:
    log.get_logger("x").info("rpc.refused", message="a" * 100_000, nested={"inner": ["b" * 9000]})
    (line,) = _written(lines)
    assert line["message"] == "a" * log.MAX_FIELD_CHARACTERS + "… (100000 characters in all)"
    assert line["nested"]["inner"][0].endswith("b… (9000 characters in all)")


def test_many_items_and_deep_ones_are_left_out_with_a_mark(lines: io.StringIO) -> None:
    deep: list[object] = []
    for _ in range(50):
        deep = [deep]
    log.get_logger("x").info("x.y", many=list(range(300)), named={str(n): n for n in range(300)}, deep=deep)
    (line,) = _written(lines)
    assert line["many"][255:] == [255, "… (44 more items)"]
    assert (len(line["named"]), line["named"]["…"]) == (257, "44 more items")
    assert json.dumps(line["deep"], ensure_ascii=False) == "[" * 8 + '"… (1 more items)"' + "]" * 8


@given(st.integers(-120, 20), st.integers(0, 3))
def test_a_secret_at_the_cut_is_not_shown_in_part(offset: int, before: int) -> None:
    secret = "eyJhbGciOiJFZERTQSJ9." + "hunter2" * 9 + ".c2lnbmF0dXJl"
    filler = "Bearer " + "x" * 40_000 + " "
    text = (filler * before).ljust(16 * log.MAX_FIELD_CHARACTERS + offset, ".") + " " + secret
    assert "hunter2" not in str(log.redact(None, "info", {"a": text})["a"])


@pytest.mark.parametrize("form", ["json", "console"])
def test_text_of_others_acts_on_no_screen_that_shows_a_line(form: Literal["json", "console"]) -> None:
    stream = io.StringIO()
    log.configure("raas", log_format=form, stream=stream)
    log.get_logger("x").info("task.failed", detail=HOSTILE)
    [line] = re.sub(r"\x1b\[\d+m", "", stream.getvalue()).split("\n")[:-1]  # colours of our own
    assert not re.search("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]", line)
    assert "owned" in line
