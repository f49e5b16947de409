"""The window of one push stream: requests being worked on, answered in the order they came.

At most 64 requests or 16 MiB are inside at once; a full window stops reading, so HTTP/2 flow control reaches
the node. Made by the trajectory service per stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from astraflow_dataflow.episodes.ingest import PushOutcome

MAX_REQUESTS = 64
MAX_BYTES = 16 * 2**20


class PushWindow:
    """Pushes in flight, oldest first."""

    def __init__(self) -> None:
        self._inside: deque[tuple[int, int, asyncio.Task[PushOutcome]]] = deque()
        self._bytes = 0
        self._ended = False
        self._changed = asyncio.Condition()

    async def add(self, sequence: int, size_bytes: int, push: Coroutine[Any, Any, PushOutcome]) -> None:
        """Start a push once there is room."""
        task = asyncio.create_task(push, name=f"push {sequence}")
        async with self._changed:
            self._inside.append((sequence, size_bytes, task))
            self._bytes += size_bytes
            self._changed.notify_all()
            await self._changed.wait_for(self._has_room)

    async def end(self) -> None:
        """No more pushes will be added."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def answers(self) -> AsyncIterator[tuple[int, PushOutcome]]:
        """Yield (sequence, outcome) in order until the last push was answered. Raises a push's error in its turn."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._inside or self._ended)
                if not self._inside:
                    return
                sequence, size_bytes, task = self._inside[0]
            outcome = await task
            async with self._changed:
                self._inside.popleft()
                self._bytes -= size_bytes
                self._changed.notify_all()
            yield sequence, outcome

    def close(self) -> None:
        """Cancel what is still inside; committed pushes stay committed."""
        for _, _, task in self._inside:
            task.cancel()
        self._inside.clear()

    def _has_room(self) -> bool:
        return self._ended or (len(self._inside) < MAX_REQUESTS and self._bytes < MAX_BYTES)
