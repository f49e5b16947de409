"""The node's side of a `Work` stream, for tests of the dataflow server.

Responses are sorted by kind as they arrive, so a test waits for the one it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from astraflow.dataflow.v1 import task_service_pb2 as pb
from astraflow.dataflow.v1.durability_pb2 import Watermark
from astraflow.dataflow.v1.version_pb2 import Version
from astraflow.rollout.v1.task_pb2 import Lease
from support.dataflow_world import World

if TYPE_CHECKING:
    import grpc


Item = TypeVar("Item")


class Session:
    """The node's side of a `Work` stream; responses are sorted by kind as they arrive."""

    def __init__(self, call: grpc.aio.StreamStreamCall[pb.WorkRequest, pb.WorkResponse]) -> None:
        self.call = call
        self.leases: asyncio.Queue[Lease] = asyncio.Queue()
        self.cancels: asyncio.Queue[pb.Cancel] = asyncio.Queue()
        self.versions: asyncio.Queue[Version] = asyncio.Queue()
        self.drains: asyncio.Queue[pb.Drain] = asyncio.Queue()
        self.watermarks: asyncio.Queue[Watermark] = asyncio.Queue()
        self.beats: asyncio.Queue[pb.Beat] = asyncio.Queue()

    async def read(self) -> None:
        """Sort responses until the stream ends."""
        async for response in self.call:
            kind = response.WhichOneof("kind")
            assert kind is not None, "the server sent an empty message"
            queue: asyncio.Queue[object] = getattr(self, f"{kind}s")
            queue.put_nowait(getattr(response, kind))

    async def receipt(self, *lease_ids: str) -> None:
        """Confirm leases."""
        await self.call.write(pb.WorkRequest(receipt=pb.Receipt(lease_ids=lease_ids)))

    async def leased(self) -> Lease:
        """Give one credit and wait for its lease."""
        await self.credits(1, solver=0)
        return await soon(self.leases)

    async def renew(self, *lease_ids: str) -> None:
        """Renew leases."""
        await self.call.write(pb.WorkRequest(renewal=pb.Renewal(lease_ids=lease_ids)))

    async def credits(
        self, tasks: int, *, leases_received: int | None = None, waiting_for: str = "", **serving: int
    ) -> None:
        """Give credits; `leases_received` says which leases they take into account."""
        given = pb.Credits(
            tasks=tasks, serving_versions=serving, leases_received=leases_received, waiting_for=waiting_for
        )
        await self.call.write(pb.WorkRequest(credits=given))


@asynccontextmanager
async def working(
    world: World, node_id: str = "n1", *, held: Sequence[str] | None = None
) -> AsyncIterator[Session]:
    """An open session of a joined node; `held` says which leases it holds."""
    call = world.speaking(world.nodes[node_id].credential).open(world.client.tasks.Work)
    hello = pb.Hello()
    if held is not None:
        hello.held.CopyFrom(pb.Renewal(lease_ids=held))
    await call.write(pb.WorkRequest(hello=hello))
    session = Session(call)
    reader = asyncio.create_task(session.read())
    try:
        yield session
    finally:
        call.cancel()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def soon(queue: asyncio.Queue[Item]) -> Item:
    """The next item, within ten seconds."""
    return await asyncio.wait_for(queue.get(), 10)
