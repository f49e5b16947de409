"""Background work of a run that must never end by accident: a defect is logged and the work begins again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from astraflow_kit.log import get_logger

log = get_logger(__name__)

_AGAIN_S = 1.0


async def supervised(work: Callable[[], Awaitable[None]], *, name: str) -> None:
    """Run `work` until it returns or is cancelled; after an error, log it and run it again."""
    while True:
        try:
            await work()
        except Exception as error:
            log.error("background.failed", name=name, exc_info=error)
            await asyncio.sleep(_AGAIN_S)
        else:
            return
