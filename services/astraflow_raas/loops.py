"""A lifecycle service that is one loop, ended by cancelling it where it waits.

Invariant: `stop` returns after the loop has left its last `finally`, or after its deadline; an error inside
the loop still ends the daemon, a cancellation from outside still spreads. Base of everything in the node that
runs on its own.
"""

import asyncio


class LoopService:
    """Subclasses write `_loop`; it runs until it returns, raises, or `stop` cancels it."""

    def __init__(self) -> None:
        self._loop_task: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Nothing to bind."""

    async def run(self) -> None:
        """Run the loop. Raises its error."""
        if self._stopped:
            return
        self._loop_task = asyncio.create_task(self._loop(), name=type(self).__name__)
        try:
            await self._loop_task
        except asyncio.CancelledError:
            if not self._stopped:
                raise

    async def stop(self, *, deadline_s: float) -> None:
        """Cancel the loop and wait at most `deadline_s` for its end. Idempotent."""
        self._stopped = True
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.wait((self._loop_task,), timeout=deadline_s)

    async def _loop(self) -> None:
        raise NotImplementedError
