"""The window of one push stream: requests in hand, taken together as they come and answered in their order.

At most 128 episodes or 16 MiB are inside at once; a full window stops reading, so HTTP/2 flow control reaches
the node. A commit of many costs each much less, so a stream on which requests come before those before them are
answered is busy: what comes is gathered for as long as several more take at the pace of the last ones, a moment
at most, or until half of the window is: then one half is checked while the other is committed. On a quiet stream
nothing waits. Made by the trajectory service per stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Work: TypeAlias = Callable[[Sequence[Request]], Coroutine[Any, Any, Sequence[Answer | Exception]]]
"""Answers several requests: an answer, or what is wrong, of each."""
MAX_EPISODES = 128
MAX_BYTES = 16 * 2**20
_PORTION = MAX_EPISODES // 2
"""Episodes that are taken at a time."""
_IN_HAND = 2
"""So often requests are taken at a time: while the commit of some is under way others are checked."""
_GATHERED = 8
"""Requests that are waited for, by the time that the last ones took to come."""
_LEAST_WAIT_S, _MOST_WAIT_S = 0.004, 0.032


_now_s = time.monotonic


class PushWindow(Generic[Request, Answer]):
    """Requests in hand, oldest first."""

    def __init__(self, work: Work[Request, Answer]) -> None:
        self._work = work
        self._inside: deque[tuple[int, int, asyncio.Future[Answer]]] = deque()
        self._waiting: deque[tuple[int, Request, asyncio.Future[Answer]]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._episodes = self._bytes = self._waiting_episodes = 0
        self._ended = False
        self._is_busy = self._is_gathering = False
        self._came_s = self._gap_s = 0.0
        """When the last request came, and how long after the one before they came lately."""
        self._came, self._left, self._enough = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def wait_s(self) -> float:
        """How long a busy stream's requests are gathered, at the pace at which they come now."""
        return min(max(_LEAST_WAIT_S, _GATHERED * self._gap_s), _MOST_WAIT_S)

    async def add(self, num_episodes: int, size_bytes: int, request: Request) -> None:
        """Take a request in, and return once there is room for another."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._note_pace(_now_s())
        self._inside.append((num_episodes, size_bytes, answer))
        self._waiting.append((num_episodes, request, answer))
        self._episodes += num_episodes
        self._bytes += size_bytes
        self._waiting_episodes += num_episodes
        self._came.set()
        self._note_enough()
        self._put_to_work()
        while not self._has_room():
            self._left.clear()
            await self._left.wait()
            self._note_enough()

    async def end(self) -> None:
        """No more requests will be added."""
        self._ended = True
        self._came.set()
        self._note_enough()
        self._left.set()

    async def answers(self) -> AsyncIterator[list[Answer]]:
        """Yield answers in order until that of the last request, together those that are there together. Raises a
        request's error in its turn.
        """
        while True:
            while not self._inside:
                if self._ended:
                    return
                self._came.clear()
                await self._came.wait()
            answers = [await self._inside[0][-1]]
            self._leave()
            while self._inside and _has_answer(self._inside[0][-1]):
                answers.append(self._inside[0][-1].result())
                self._leave()
            self._left.set()
            yield answers

    def close(self) -> None:
        """Leave what is still inside; committed pushes stay committed."""
        for worker in self._workers:
            worker.cancel()
        for *_, answer in self._inside:
            answer.cancel()
            if not answer.cancelled():
                answer.exception()  # nobody will hear it
        self._inside.clear()

    def _leave(self) -> None:
        num_episodes, size_bytes, _ = self._inside.popleft()
        self._episodes -= num_episodes
        self._bytes -= size_bytes

    def _note_pace(self, now_s: float) -> None:
        self._is_busy = bool(self._inside)
        if self._is_busy:
            self._gap_s += (now_s - self._came_s - self._gap_s) / 4
        self._came_s = now_s

    def _put_to_work(self) -> None:
        """See that what waits is taken, unless as much is in hand as may be, or somebody gathers."""
        if self._waiting and len(self._workers) < _IN_HAND and not self._is_gathering:
            self._workers.add(asyncio.create_task(self._answer_waiting(), name="pushes in hand"))

    async def _answer_waiting(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        try:
            while self._waiting and not self._is_gathering:
                if self._is_busy:
                    await self._until_enough_wait()
                taken = self._take()
                self._put_to_work()  # of what is left over
                if taken:  # else the other worker took them
                    await self._answer(*zip(*taken, strict=True))
        finally:
            # At once, since nobody takes a request that comes when all workers have just found nothing.
            self._workers.discard(worker)

    def _take(self) -> list[tuple[Request, asyncio.Future[Answer]]]:
        taken, num_taken = list[tuple[Request, asyncio.Future[Answer]]](), 0
        while self._waiting and num_taken < _PORTION:
            num_episodes, request, answer = self._waiting.popleft()
            taken.append((request, answer))
            num_taken += num_episodes
        self._waiting_episodes -= num_taken
        self._note_enough()
        return taken

    def _note_enough(self) -> None:
        if self._waiting_episodes >= _PORTION or not self._has_room() or self._ended:
            self._enough.set()
        else:
            self._enough.clear()

    async def _until_enough_wait(self) -> None:
        self._is_gathering = True
        try:
            async with asyncio.timeout(self.wait_s):
                await self._enough.wait()
        except TimeoutError:
            pass
        finally:
            self._is_gathering = False

    async def _answer(self, requests: Sequence[Request], answers: Sequence[asyncio.Future[Answer]]) -> None:
        try:
            answered = await self._work(requests)
        except Exception as error:  # noqa: BLE001 - raised in the turn of each
            answered = [error for _ in requests]
        for future, answer in zip(answers, answered, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _has_room(self) -> bool:
        return self._ended or (self._episodes < MAX_EPISODES and self._bytes < MAX_BYTES)


def _has_answer(answer: asyncio.Future[Any]) -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None
