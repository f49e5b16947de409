"""What keeping payloads outside the main Redis costs, and what it leaves there.

Invariant: each place gets the same pushes over servers and a Redis of its own, one after the other. Called by
`experiment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from astraflow_bench.dataflow.driving import Driver
from astraflow_bench.dataflow.processes import over_redis, redis_process
from astraflow_bench.dataflow.sizes import GROUP, PlaneSizes
from astraflow_bench.dataflow.workload import Episodes
from astraflow_bench.figures import Figure, cpu_seconds
from astraflow_kit.ports import free_port

_TOKENS = 2048
_PLACES = ("the same Redis", "a second Redis", "a folder")


async def measure_payloads(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """Push and fetch groups while payloads are in each of the places."""
    figures: list[Figure] = []
    for place in _PLACES:
        own = folder / place.replace(" ", "-")
        own.mkdir()
        with _holder(place, own) as (options, others):
            async with over_redis(own / "bed", options=options) as bed:
                driver = await Driver.create(bed.client, groups_per_step=sizes.batch_groups)
                episodes = Episodes(driver.run_id, num_response=_TOKENS)
                before = bed.resp.held_bytes()
                leases = await driver.leased(sizes.batches * sizes.batch_groups, prefix="task-")
                began_s = cpu_seconds(others)
                with bed.spending() as pushed:
                    await driver.push(leases, episodes, packed=True)
                others_s, held = cpu_seconds(others) - began_s, bed.resp.held_bytes() - before
                with bed.spending() as fetched:
                    await driver.acquire()
                    await driver.fetch()
        batch = GROUP * sizes.batch_groups
        count = batch * sizes.batches
        row = partial(Figure, subject=f"payloads in {place}")
        cpu = partial(row, unit="µs")
        figures += [
            row(what="main Redis: memory of a trajectory", value=held / count, unit="B"),
            cpu(what="main Redis: CPU of a push", value=1e6 * pushed.redis_s / count),
            cpu(what="other Redis: CPU of a push", value=1e6 * others_s / count),
            cpu(what="server: CPU of a push", value=1e6 * pushed.server_s / count),
            cpu(what="server: CPU of a fetch", value=1e6 * fetched.server_s / batch),
        ]
    return figures


@contextmanager
def _holder(place: str, folder: Path) -> Iterator[tuple[list[str], list[int]]]:
    """What tells servers to keep payloads there, and the processes that keep them."""
    if place == "a second Redis":
        port = free_port()
        (folder / "payloads").mkdir()
        with redis_process(folder / "payloads", port) as pid:
            yield ["--payloads", f"redis://127.0.0.1:{port}/0"], [pid]
    elif place == "a folder":
        yield ["--payloads", f"file://{folder / 'payloads'}"], []
    else:
        yield [], []
