"""How long a Redis that was killed takes to come back, by what it holds.

Invariant: the append-only file is read as the kill left it. Called by `experiment`.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

import psutil

from astraflow.client import RetryPolicy
from astraflow.dataflow.v1 import run_service_pb2
from astraflow_bench.dataflow.driving import Driver
from astraflow_bench.dataflow.processes import Bed, over_redis
from astraflow_bench.dataflow.sizes import GROUP, PlaneSizes
from astraflow_bench.dataflow.workload import Episodes
from astraflow_bench.figures import Figure

_TOKENS = 2048
_PATIENCE = RetryPolicy(total_s=600)


async def measure_restart(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """Fill Redis with trajectories, kill it, start it again."""
    figures: list[Figure] = []
    for resident in sizes.resident_mib:
        async with over_redis(folder / f"{resident}") as bed:
            driver = await Driver.create(bed.client, groups_per_step=65_536)
            await _fill(driver, sizes, num_bytes=resident * 2**20)
            held = bed.resp.held_bytes()
            redis = psutil.Process(bed.redis)
            redis.kill()
            redis.wait()
            began_s = time.perf_counter()
            with bed.redis_again():
                loaded_s = time.perf_counter() - began_s
                await _answered(bed, driver.run_id)
                served_s = time.perf_counter() - began_s
        row = partial(Figure, subject=f"{held / 2**20:,.0f} MiB in Redis")
        figures += [
            row(what="restart: until Redis answers", value=loaded_s, unit="s"),
            row(what="restart: until a server answers", value=served_s, unit="s"),
            row(what="restart: Redis, for each GiB it holds", value=loaded_s * 2**30 / held, unit="s"),
        ]
    return figures


async def _fill(driver: Driver, sizes: PlaneSizes, *, num_bytes: int) -> None:
    episodes = Episodes(driver.run_id, num_response=_TOKENS)
    groups = math.ceil(num_bytes / (GROUP * episodes.body_bytes))
    for first in range(0, groups, sizes.batch_groups):
        leases = await driver.leased(min(sizes.batch_groups, groups - first), prefix=f"{first}-")
        await driver.push(leases, episodes, packed=True)


async def _answered(bed: Bed, run_id: str) -> None:
    """Return once the server has read the run from the Redis that came back."""
    request = run_service_pb2.GetRunRequest(run_id=run_id)
    await bed.client.call(bed.client.runs.GetRun, request, retry=_PATIENCE, harmless=True)
