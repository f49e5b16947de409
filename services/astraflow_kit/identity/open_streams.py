"""Streams that are open longer than their token is good.

Invariant: a stream ends within `LOOK_EVERY_S` of the moment from which its token would be refused. The end is
UNAVAILABLE, which clients answer by opening it anew: the new call is then admitted, with a fresh token, or refused for
good. Built by `serve`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from astraflow.errors import UnavailableError
from astraflow_kit.identity.tokens import Identity
from astraflow_kit.identity.verifier import Verifier

LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class _Stream:
    identity: Identity
    task: "asyncio.Task[Any]" = field(repr=False)
    ended_by: str = ""


class OpenStreams:
    """The open calls of callers with tokens."""

    def __init__(self, verifier: Verifier | None) -> None:
        self._verifier = verifier
        self._open: set[_Stream] = set()

    @contextmanager
    def while_good(self, identity: Identity) -> Iterator[None]:
        """Within the block, the current task is a call of this caller. Raises UnavailableError when its token ends."""
        task = asyncio.current_task()
        if self._verifier is None or not identity.token_id or task is None:
            yield
            return
        stream = _Stream(identity, task)
        self._open.add(stream)
        try:
            yield
        except asyncio.CancelledError:
            if not stream.ended_by:
                raise
            task.uncancel()
            raise UnavailableError(
                f"{stream.ended_by}, so this call ended; repeat it with a fresh token"
            ) from None
        finally:
            self._open.discard(stream)

    def end_those_without_token(self) -> None:
        """End the calls whose token is not good any more."""
        if self._verifier is None:
            return
        for stream in self._open:
            if not stream.ended_by and (why := self._verifier.ended(stream.identity)):
                stream.ended_by = why
                stream.task.cancel()
