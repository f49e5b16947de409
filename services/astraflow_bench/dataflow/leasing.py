"""What a lease costs, and how soon leases that their node lost are leased again.

Called by `experiment`.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from astraflow_bench.dataflow.driving import Driver
from astraflow_bench.dataflow.processes import Bed, over_redis
from astraflow_bench.dataflow.sizes import PlaneSizes
from astraflow_bench.figures import Figure
from astraflow_dataflow.store.keys import Keys

_MOST_S_FOR_64_000 = 10.0


async def measure_leases(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """Submit, lease, let all expire, lease them again."""
    count = sizes.leases
    async with over_redis(folder / "bed") as bed:
        driver = await Driver.create(bed.client, groups_per_step=65_536)
        with bed.spending() as submitted:
            await driver.submit(count, prefix="t")
        with bed.spending() as leased:
            await driver.lease(count)
        _let_expire(bed, driver.run_id)
        await driver.join("other")
        with bed.slow_calls() as slowest:
            began_s = time.perf_counter()
            await driver.lease(count, node_id="other")
            again_s = time.perf_counter() - began_s
    row = partial(Figure, subject=f"{count:,} tasks")
    micros = partial(row, unit="µs")
    return [
        row(what="submit: rate", value=count / submitted.seconds, unit="tasks/s"),
        micros(what="submit: server CPU", value=1e6 * submitted.server_s / count),
        micros(what="submit: Redis CPU", value=1e6 * submitted.redis_s / count),
        row(what="lease: rate", value=count / leased.seconds, unit="leases/s"),
        micros(what="lease: server CPU", value=1e6 * leased.server_s / count),
        micros(what="lease: Redis CPU", value=1e6 * leased.redis_s / count),
        row(what="lease: Redis commands", value=leased.num_commands / count, unit="a lease"),
        row(
            what="expired leases are leased again",
            value=again_s,
            unit="s",
            most=_MOST_S_FOR_64_000 if count >= 64_000 else None,
        ),
        row(what=f"longest call meanwhile: {slowest[0][1]}", value=slowest[0][0], unit="ms", most=5.0),
    ]


def _let_expire(bed: Bed, run_id: str) -> None:
    """All leases of a run are past their deadline, as after a long silence of their node."""
    key = Keys(run_id).of("leases")
    held = bed.resp.command("ZRANGE", key, 0, -1)
    ids = [task for task in held if isinstance(task, bytes)] if isinstance(held, list) else []
    for first in range(0, len(ids), 1000):
        bed.resp.command("ZADD", key, *(word for task in ids[first : first + 1000] for word in (0, task)))
