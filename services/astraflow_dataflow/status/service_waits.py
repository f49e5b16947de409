"""Waits beside the data path: whom the server does not let in, and what keeps trajectories out of the archive.

Pure. Called by reporting, after `waits`.
"""

from collections.abc import Iterator, Sequence

from astraflow_dataflow.records import ArchiveState
from astraflow_dataflow.rules.waits import Wait
from astraflow_kit.identity.refusals import Refusal
from astraflow_kit.identity.tokens import Identity, shown_time

_GIVEN_UP_SHOWN_MS = 60_000
"""What was given up is shown this long."""
_MAX_LISTED = 4


def archive_waits(archive: ArchiveState, *, now_ms: int) -> Iterator[Wait]:
    """What keeps trajectories out of the archive; training goes on meanwhile."""
    figures = (
        f"{archive.waiting} trajectories ({archive.waiting_bytes / 2**20:.0f} MiB) wait, "
        f"{archive.given_up} were given up"
    )
    if archive.problem:
        yield Wait(
            stage="archive",
            reason="archive_failed",
            detail=f"{archive.problem}; {figures}",
            released_by="bring the store back, or make room in it; the archive goes on by itself, training meanwhile",
            since_ms=archive.problem_ms,
        )
    elif now_ms - archive.given_up_ms < _GIVEN_UP_SHOWN_MS:
        yield Wait(
            stage="archive",
            reason="archive_behind",
            detail=f"more ends than is written: {figures}",
            released_by="a smaller dataflow.archive.share, fewer reasons to keep, or a larger max_waiting_mib",
        )


def access_waits(
    refused: Sequence[Refusal], ending: Sequence[Identity], ended: Sequence[Identity]
) -> Iterator[Wait]:
    """Callers that this server refuses, and tokens that end soon or have, which people would else learn from a silent
    node.
    """
    if refused:
        callers = [
            f"{item.subject}: {item.reason}, {item.count} times since {shown_time(item.first_s)}, last at "
            f"{shown_time(item.last_s)}"
            for item in refused
        ]
        yield Wait(
            stage="access",
            reason="callers_refused",
            detail=f"this server refuses {_listed(callers)}",
            released_by=refused[0].message,
            since_ms=int(1000 * min(item.first_s for item in refused)),
        )
    if ended:
        yield _token_wait(ended, reason="token_ended", meaning="tokens that ended in use")
    if ending:
        yield _token_wait(ending, reason="token_ends", meaning="tokens in use that end soon")


def _token_wait(tokens: Sequence[Identity], *, reason: str, meaning: str) -> Wait:
    named = [f"{token.subject}: at {shown_time(token.expires_s)}" for token in tokens]
    return Wait(
        stage="access",
        reason=reason,
        detail=f"{meaning}: {_listed(named)}",
        released_by="give these callers new tokens (astraflow token create, astraflow join-token) in the files that "
        "they read",
    )


def _listed(items: Sequence[str]) -> str:
    more = f"; and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return "; ".join(items[:_MAX_LISTED]) + more
