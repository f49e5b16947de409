"""The window of one push stream: requests being worked on, answered in the order they came.

At most 64 episodes or 16 MiB are inside at once; a full window stops reading, so HTTP/2 flow control reaches
the node. Made by the trajectory service per stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")
MAX_EPISODES = 64
MAX_BYTES = 16 * 2**20


class PushWindow(Generic[Answer]):
    """Pushes in flight, oldest first."""

    def __init__(self) -> None:
        self._inside: deque[tuple[int, int, asyncio.Task[Answer]]] = deque()
        self._episodes = self._bytes = 0
        self._ended = False
        self._came, self._left = asyncio.Event(), asyncio.Event()

    async def add(self, num_episodes: int, size_bytes: int, push: Coroutine[Any, Any, Answer]) -> None:
        """Start a push, and return once there is room for another."""
        self._inside.append((num_episodes, size_bytes, asyncio.create_task(push, name="push")))
        self._episodes += num_episodes
        self._bytes += size_bytes
        self._came.set()
        while not self._has_room():
            self._left.clear()
            await self._left.wait()

    async def end(self) -> None:
        """No more pushes will be added."""
        self._ended = True
        self._came.set()
        self._left.set()

    async def answers(self) -> AsyncIterator[Answer]:
        """Yield answers in order until that of the last push. Raises a push's error in its turn."""
        while True:
            while not self._inside:
                if self._ended:
                    return
                self._came.clear()
                await self._came.wait()
            num_episodes, size_bytes, task = self._inside[0]
            answer = await task
            self._inside.popleft()
            self._episodes -= num_episodes
            self._bytes -= size_bytes
            self._left.set()
            yield answer

    def close(self) -> None:
        """Cancel what is still inside; committed pushes stay committed."""
        for *_, task in self._inside:
            task.cancel()
        self._inside.clear()

    def _has_room(self) -> bool:
        return self._ended or (self._episodes < MAX_EPISODES and self._bytes < MAX_BYTES)
