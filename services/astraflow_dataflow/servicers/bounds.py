"""Bounds that several requests share. Pure; called by the servicers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astraflow.errors import InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf import duration_pb2

MAX_WAIT_S = 30.0


def wait_seconds(duration: duration_pb2.Duration) -> float:
    """Return a long poll's wait. Raises InvalidArgumentError when it is negative or above 30 s."""
    seconds = duration.ToNanoseconds() / 1e9
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InvalidArgumentError(
            f"wait_duration {seconds} s must be 0–{MAX_WAIT_S:g} s; call again to wait longer"
        )
    return seconds
