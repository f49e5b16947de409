"""All measurements of the data plane, one after the other: the machine is used by one at a time.

Invariant: every figure that is compared with another comes from the same section of the same run. Called by the
command `astraflow bench dataflow`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from astraflow_bench.dataflow.growth import (
    measure_backlog,
    measure_groups,
    measure_nodes,
    measure_ready,
    measure_runs,
    measure_streams,
)
from astraflow_bench.dataflow.leasing import measure_leases
from astraflow_bench.dataflow.payloads import measure_payloads
from astraflow_bench.dataflow.pushing import measure_batch, measure_pushes
from astraflow_bench.dataflow.restarting import measure_restart
from astraflow_bench.dataflow.scaling import measure_processes
from astraflow_bench.dataflow.sizes import PlaneSizes
from astraflow_bench.figures import Figure

SECTIONS: Mapping[str, Callable[[PlaneSizes, Path], Awaitable[list[Figure]]]] = {
    "push": measure_pushes,
    "batch": measure_batch,
    "payloads": measure_payloads,
    "leases": measure_leases,
    "streams": measure_streams,
    "backlog": measure_backlog,
    "groups": measure_groups,
    "ready": measure_ready,
    "nodes": measure_nodes,
    "runs": measure_runs,
    "processes": measure_processes,
    "restart": measure_restart,
}


async def measure(
    sizes: PlaneSizes, *, sections: Sequence[str], folder: Path, say: Callable[[str], None]
) -> list[Figure]:
    """Measure these sections."""
    figures: list[Figure] = []
    for name in sections:
        say(name)
        (folder / name).mkdir()
        figures += await SECTIONS[name](sizes, folder / name)
    return figures
