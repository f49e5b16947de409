"""Bounds that several requests share. Pure; called by the servicers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astraflow.errors import InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf import duration_pb2

MAX_WAIT_S = 30.0
MAX_REASON = 256


def wait_seconds(duration: duration_pb2.Duration) -> float:
    """Return a long poll's wait. Raises InvalidArgumentError when it is negative or above 30 s."""
    seconds = duration.ToNanoseconds() / 1e9
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InvalidArgumentError(
            f"wait_duration {seconds} s must be 0–{MAX_WAIT_S:g} s; call again to wait longer"
        )
    return seconds


def require_short(text: str, *, name: str, limit: int) -> None:
    """Raise InvalidArgumentError for a text beyond its bound."""
    if len(text) > limit:
        raise InvalidArgumentError(f"{name} has {len(text)} characters, at most {limit}")


def page_size(asked: int, *, default: int, most: int) -> int:
    """Return how many items a page has."""
    return min(asked or default, most)


def page_number(token: str) -> int | None:
    """Return the number a page token stands for, None for the first page. Raises InvalidArgumentError."""
    if token and not token.isdigit():
        raise InvalidArgumentError(
            f"page_token {token!r} is not one of ours; pass next_page_token of the previous page, or nothing"
        )
    return int(token) if token else None
