"""Background work of a run that must never end by accident: a defect is logged and the work begins again.

Started with a log context of its own, so its lines carry the run and not the call that happened to start it.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable

from astraflow_kit.log import bind, get_logger

log = get_logger(__name__)

_AGAIN_S = 1.0


def start(work: Callable[[], Awaitable[None]], *, name: str, run_id: str) -> asyncio.Task[None]:
    """Start supervised work; the caller owns the task."""
    return asyncio.create_task(
        supervised(work, name=name, run_id=run_id), name=f"{name} of {run_id}", context=contextvars.Context()
    )


async def supervised(work: Callable[[], Awaitable[None]], *, name: str, run_id: str) -> None:
    """Run `work` until it returns or is cancelled; after an error, log it and run it again."""
    bind(run_id=run_id)
    while True:
        try:
            await work()
        except Exception as error:
            log.error("background.failed", name=name, exc_info=error)
            await asyncio.sleep(_AGAIN_S)
        else:
            return
