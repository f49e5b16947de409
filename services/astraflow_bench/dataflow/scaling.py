"""How the push rate grows with server processes over one Redis.

Invariant: every server gets the same load, from a client process of its own. Called by `experiment`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from astraflow.client import AsyncClient
from astraflow.rollout.v1 import task_pb2
from astraflow_bench.dataflow.driving import Driver
from astraflow_bench.dataflow.processes import over_redis
from astraflow_bench.dataflow.sizes import GROUP, PlaneSizes
from astraflow_bench.dataflow.workload import Episodes
from astraflow_bench.figures import Figure

_TOKENS = 2048
_LEAST_OF_FOUR = 3.0


async def measure_processes(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """The push rate through 1, 2, 4 … processes, each with a run of its own."""
    figures: list[Figure] = []
    alone = 0.0
    for count in sizes.processes:
        async with over_redis(folder / f"{count}", num_servers=count) as bed:
            groups = sizes.batch_groups * sizes.batches
            drivers = [
                await Driver.create(bed.client, f"run-{number}", groups_per_step=65_536)
                for number in range(count)
            ]
            await _pushed_at_once(drivers, bed.addresses, groups=sizes.batch_groups, prefix="warm")
            with bed.spending() as spent:
                rate = await _pushed_at_once(drivers, bed.addresses, groups=groups, prefix="push")
        pushed = count * groups * GROUP
        alone = alone or rate / count
        row = partial(Figure, subject=f"{count} processes, {os.cpu_count()} cores")
        # Servers, clients and Redis share the cores of one machine.
        has_cores = (os.cpu_count() or 1) >= 2 * count + 2
        least = _LEAST_OF_FOUR if count == 4 and has_cores else None
        figures += [
            row(what="push 2048: rate", value=rate, unit="trajectories/s"),
            row(what="push 2048: rate over one process", value=rate / alone, unit="×", least=least),
            row(what="push 2048: server CPU", value=1e6 * spent.server_s / pushed, unit="µs"),
            row(what="push 2048: Redis CPU", value=1e6 * spent.redis_s / pushed, unit="µs"),
        ]
    return figures


async def _pushed_at_once(
    drivers: Sequence[Driver], addresses: Sequence[str], *, groups: int, prefix: str
) -> float:
    """Push to all servers, each from a process of its own; trajectories a second, together."""
    loop = asyncio.get_running_loop()
    leased = [
        [lease.SerializeToString() for lease in await driver.leased(groups, prefix=prefix)]
        for driver in drivers
    ]
    with ProcessPoolExecutor(len(addresses), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            loop.run_in_executor(pool, _push, address, driver.run_id, driver.sessions, leases)
            for address, driver, leases in zip(addresses, drivers, leased, strict=True)
        ]
        return sum(await asyncio.gather(*jobs))


def _push(address: str, run_id: str, sessions: dict[str, str], leased: Sequence[bytes]) -> float:
    async def work() -> float:
        async with AsyncClient(address) as client:
            driver = Driver(
                client=client,
                run_id=run_id,
                group_size=GROUP,
                groups_per_step=65_536,
                sessions=sessions,
            )
            leases = [task_pb2.Lease.FromString(lease) for lease in leased]
            began_s = time.perf_counter()
            pushed = await driver.push(leases, Episodes(run_id, num_response=_TOKENS))
            return pushed / (time.perf_counter() - began_s)

    return asyncio.run(work())
