"""Waiting until a server's status says what a test waits for."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from astraflow.dataflow.v1 import admin_service_pb2
from astraflow.errors import UnavailableError
from support.dataflow_world import World

PATIENCE_S = 60.0
Status = admin_service_pb2.StatusResponse


async def status_where(world: World, holds: Callable[[Status], bool], *, what: str) -> Status:
    """Ask for the status until `holds(status)`; fails naming `what` was waited for."""
    seen: Status | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while seen is None or not holds(seen):
                await asyncio.sleep(0.02)
                with suppress(UnavailableError):  # Redis is being restarted
                    seen = await world.status()
            return seen
    except TimeoutError:
        raise AssertionError(f"never: {what}; last status:\n{seen}") from None


async def serves(world: World, version: int) -> None:
    """Wait until a node says that it serves this version of the policy `solver`."""
    await status_where(
        world,
        lambda status: any(dict(node.serving_versions) == {"solver": version} for node in status.nodes),
        what=f"version {version} serves",
    )
