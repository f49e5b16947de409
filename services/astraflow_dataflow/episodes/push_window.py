"""The window of one push stream: requests being worked on, answered in the order they came.

At most 64 requests or 16 MiB are inside at once; a full window stops reading, so HTTP/2 flow control reaches
the node. Made by the trajectory service per stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

from astraflow.dataflow.v1.trajectory_service_pb2 import PushResult

Key = TypeVar("Key")
MAX_REQUESTS = 64
MAX_BYTES = 16 * 2**20


class PushWindow(Generic[Key]):
    """Pushes in flight, oldest first, each under what its answer needs to know of it."""

    def __init__(self) -> None:
        self._inside: deque[tuple[Key, int, asyncio.Task[PushResult]]] = deque()
        self._bytes = 0
        self._ended = False
        self._changed = asyncio.Condition()

    async def add(self, key: Key, size_bytes: int, push: Coroutine[Any, Any, PushResult]) -> None:
        """Start a push once there is room."""
        task = asyncio.create_task(push, name=f"push {key}")
        async with self._changed:
            self._inside.append((key, size_bytes, task))
            self._bytes += size_bytes
            self._changed.notify_all()
            await self._changed.wait_for(self._has_room)

    async def end(self) -> None:
        """No more pushes will be added."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def answers(self) -> AsyncIterator[tuple[Key, PushResult]]:
        """Yield (key, result) in order until the last push was answered. Raises a push's error in its turn."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._inside or self._ended)
                if not self._inside:
                    return
                key, size_bytes, task = self._inside[0]
            result = await task
            async with self._changed:
                self._inside.popleft()
                self._bytes -= size_bytes
                self._changed.notify_all()
            yield key, result

    def close(self) -> None:
        """Cancel what is still inside; committed pushes stay committed."""
        for _, _, task in self._inside:
            task.cancel()
        self._inside.clear()

    def _has_room(self) -> bool:
        return self._ended or (len(self._inside) < MAX_REQUESTS and self._bytes < MAX_BYTES)
