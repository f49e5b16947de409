"""What grows: idle streams and runs, waiting tasks, open groups, ready trajectories, nodes.

Invariant: each figure is of one more of the same, or of a call while so many are there. Called by `experiment`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow_bench.dataflow.driving import Driver
from astraflow_bench.dataflow.processes import Bed, over_redis
from astraflow_bench.dataflow.raw import memory_of_streams
from astraflow_bench.dataflow.sizes import GROUP, PlaneSizes
from astraflow_bench.dataflow.workload import Episodes
from astraflow_bench.figures import Figure

_SHORT = 16
_MOST_CALL_MS = 5.0
_STATUS_CALLS = 5
_AT_A_TIME = 50
_SAMPLE = 256


async def measure_streams(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """Memory and CPU of the server for each `Work` stream on which nothing happens, and of an idle run."""
    figures: list[Figure] = []
    async with over_redis(folder / "bed") as bed:
        driver = await Driver.create(bed.client)
        figures += await _idle(bed, sizes, subject="1 run, no stream", is_target=True)
        for count in sizes.streams:
            before = bed.resident_bytes(bed.servers[0])
            async with AsyncExitStack() as stack:
                for first in range(0, count, _AT_A_TIME):
                    names = [f"n{n}" for n in range(first, min(first + _AT_A_TIME, count))]
                    await asyncio.gather(*(driver.join(name) for name in names))
                    for name in names:
                        await stack.enter_async_context(_stream(driver, name))
                await asyncio.sleep(1.0)
                grown = bed.resident_bytes(bed.servers[0]) - before
                figures += await _idle(bed, sizes, subject=f"{count:,} streams")
            row = partial(Figure, what="memory of a stream", unit="kB")
            raw = await memory_of_streams(folder, count=count)
            most = 30.0 if count >= 1000 else None
            figures += [
                row(subject=f"{count:,} streams", value=grown / count / 1e3, most=most),
                row(subject=f"{count:,} raw gRPC streams", value=raw / 1e3),
            ]
    return figures


async def measure_backlog(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """What a lease costs, and Redis holds, while so many tasks wait."""
    figures: list[Figure] = []
    async with over_redis(folder / "bed") as bed:
        driver = await Driver.create(bed.client, groups_per_step=65_536)
        before, waiting = _redis_bytes(bed), 0
        for count in sizes.backlog:
            await driver.submit(count - waiting, prefix=f"b{count}-")
            row, waiting = partial(Figure, subject=f"{count:,} tasks wait"), count
            held = _redis_bytes(bed) - before
            sample = min(_SAMPLE, count)
            with bed.spending() as leased:
                await driver.lease(sample)
            waiting -= sample
            figures += [
                row(what="Redis memory of a task", value=held / count, unit="B"),
                row(what="lease: Redis CPU", value=1e6 * leased.redis_s / sample, unit="µs"),
                row(what="lease: server CPU", value=1e6 * leased.server_s / sample, unit="µs"),
            ]
    return figures


async def measure_groups(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """What a push and a status cost while so many groups are open."""
    figures: list[Figure] = []
    async with over_redis(folder / "bed") as bed:
        driver = await Driver.create(bed.client, groups_per_step=65_536)
        episodes, opened = Episodes(driver.run_id, num_response=_SHORT, num_prompt=_SHORT), 0
        for count in sizes.open_groups:
            leases = await driver.leased(count - opened, prefix=f"g{count}-")
            opened = count
            with bed.spending() as pushed, bed.slow_calls() as slowest:
                num = await driver.push(leases, episodes, members=1)
            row = partial(Figure, subject=f"{count:,} open groups")
            figures += [
                row(what="push: server CPU", value=1e6 * pushed.server_s / num, unit="µs"),
                row(what="push: Redis CPU", value=1e6 * pushed.redis_s / num, unit="µs"),
                row(
                    what=f"longest call of pushes: {slowest[0][1]}",
                    value=slowest[0][0],
                    unit="ms",
                    most=_MOST_CALL_MS,
                ),
                *await _status(bed, driver, subject=f"{count:,} open groups"),
            ]
    return figures


async def measure_ready(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """What a batch and a status cost, and the longest call, while so many trajectories are ready."""
    groups = max(1, sizes.ready // GROUP)
    subject = f"{groups * GROUP:,} ready trajectories"
    async with over_redis(folder / "bed") as bed:
        driver = await Driver.create(bed.client, groups_per_step=min(sizes.batch_groups, groups))
        episodes = Episodes(driver.run_id, num_response=_SHORT, num_prompt=_SHORT)
        before = _redis_bytes(bed)
        await driver.push(await driver.leased(groups, prefix="r"), episodes)
        held = _redis_bytes(bed) - before
        size, beside = GROUP * driver.groups_per_step, held / (groups * GROUP) - episodes.body_bytes
        with bed.spending() as served, bed.slow_calls() as slowest:
            batch = await driver.acquire()
            await driver.fetch()
            await driver.finish(batch)
        row = partial(Figure, subject=subject)
        return [
            row(what="Redis memory of a trajectory beside its payload", value=beside, unit="B"),
            row(what=f"batch of {size}: server CPU", value=1e6 * served.server_s / size, unit="µs a trajectory"),
            row(what=f"batch of {size}: Redis CPU", value=1e6 * served.redis_s / size, unit="µs a trajectory"),
            row(what=f"longest call of a step: {slowest[0][1]}", value=slowest[0][0], unit="ms", most=_MOST_CALL_MS),
            *await _status(bed, driver, subject=subject),
        ]  # fmt: skip


async def measure_nodes(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """What a status costs with so many nodes."""
    async with over_redis(folder / "bed") as bed:
        driver = await Driver.create(bed.client)
        for first in range(0, sizes.nodes, _AT_A_TIME):
            names = range(first, min(first + _AT_A_TIME, sizes.nodes))
            await asyncio.gather(*(driver.join(f"n{n}") for n in names))
        most = 20.0 if sizes.nodes >= 1000 else None
        return await _status(bed, driver, subject=f"{sizes.nodes:,} nodes", most_cpu_ms=most)


async def measure_runs(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """What idle runs cost."""
    figures: list[Figure] = []
    async with over_redis(folder / "bed") as bed:
        made, before = 0, bed.resident_bytes(bed.servers[0])
        for count in sizes.runs:
            for number in range(made, count):
                await Driver.create(bed.client, f"run-{number}")
            made = count
            figures += await _idle(bed, sizes, subject=f"{count:,} runs")
            held = (bed.resident_bytes(bed.servers[0]) - before) / count / 1e3
            figures.append(Figure(what="memory of a run", subject=f"{count:,} runs", value=held, unit="kB"))
    return figures


async def _idle(bed: Bed, sizes: PlaneSizes, *, subject: str, is_target: bool = False) -> list[Figure]:
    await asyncio.sleep(1.0 + sizes.idle_s)  # what was just made settles
    with bed.spending() as spent:
        await asyncio.sleep(sizes.idle_s)
    core = partial(Figure, subject=subject, unit="% of a core")
    return [
        core(
            what="idle: server", value=100 * spent.server_s / spent.seconds, most=0.5 if is_target else None
        ),
        core(what="idle: Redis", value=100 * spent.redis_s / spent.seconds),
        Figure(
            what="idle: Redis commands",
            subject=subject,
            value=spent.num_commands / spent.seconds,
            unit="/s",
            most=5.0 if is_target else None,
        ),
    ]


async def _status(
    bed: Bed, driver: Driver, *, subject: str, most_cpu_ms: float | None = None
) -> list[Figure]:
    client, request = driver.client, admin.StatusRequest(run_id=driver.run_id)
    with bed.slow_calls() as slowest, bed.spending() as spent:
        for _ in range(_STATUS_CALLS):
            await client.call(client.admin.Status, request, timeout_s=60.0)
    row = partial(Figure, subject=subject, unit="ms")
    return [
        row(what="Status: server CPU", value=1e3 * spent.server_s / _STATUS_CALLS, most=most_cpu_ms),
        row(what="Status: Redis CPU", value=1e3 * spent.redis_s / _STATUS_CALLS),
        row(what=f"Status, longest call: {slowest[0][1]}", value=slowest[0][0], most=_MOST_CALL_MS),
    ]


@asynccontextmanager
async def _stream(driver: Driver, node_id: str) -> AsyncIterator[None]:
    """A node's `Work` stream with credit for nothing, which says every two seconds that it lives."""
    # Streams of one client share a connection and its bound of streams; nodes have one each.
    async with AsyncClient(driver.client.address) as client:
        client.session = driver.sessions[node_id]
        call = client.open(client.tasks.Work)
        await call.write(tasks.WorkRequest(hello=tasks.Hello()))

        async def live() -> None:
            while True:
                await call.write(tasks.WorkRequest(credits=tasks.Credits(tasks=0)))
                await asyncio.sleep(2.0)

        async def read() -> None:
            async for _ in call:
                pass

        both = asyncio.gather(live(), read())
        try:
            yield
        finally:
            both.cancel()
            call.cancel()
            await asyncio.gather(both, return_exceptions=True)


def _redis_bytes(bed: Bed) -> int:
    reply = bed.resp.command("INFO", "memory")
    found = re.search(rb"used_memory:(\d+)", reply) if isinstance(reply, bytes) else None
    if found is None:
        raise RuntimeError("Redis does not say how much memory it uses")
    return int(found[1])
