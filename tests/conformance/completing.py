"""A node for the programs of other languages, which only submit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.dataflow_world import Node


@asynccontextmanager
async def completing(node: Node) -> AsyncIterator[None]:
    """A node that finishes every task: the reward is the number of the member."""

    async def work() -> None:
        while True:
            await node.complete_all(await node.lease(8, wait_s=1.0))

    working = asyncio.create_task(work())
    try:
        yield
    finally:
        working.cancel()
        await asyncio.wait((working,))
