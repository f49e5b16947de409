"""Runs a recipe in a central region, with pools of nodes of given speeds at both ends of a long link.

Invariant: the run is `astraflow dev` in a network namespace, with everything that measures other studies; only its
nodes are started here, in the namespaces of their pools, where they dial the server and a store of the central region.
Needs root and a radosgw, as `astraflow bench wan` does. `heterogeneous` names the pools and when they come and go.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from astraflow.errors import InternalError, PreconditionError
from astraflow_bench.studies.study import Cell
from astraflow_bench.wan import radosgw
from astraflow_bench.wan.links import LinkPlan, Place, link_to
from astraflow_bench.wan.network import Network, missing_tools
from astraflow_bench.wan.role_processes import RoleProcesses
from astraflow_kit.log_files import end_of
from astraflow_kit.parent import python
from astraflow_launcher.view.metrics_file import read_lines

PLAN = LinkPlan(rate_bits_per_s=4e9, rtt_s=0.3)
_LIFE_S = 1800.0
"""Of a run, whatever happens in it."""
_PORT, _FORWARDED = 7070, 7071
_BUCKET = "weights"
_POLL_S = 0.5
_END_S = 60.0
_TAIL = 2000


@dataclass(frozen=True, kw_only=True)
class PoolPlace:
    """A pool of one node: how fast it is and where."""

    name: str
    speed: float
    place: Place


@dataclass(frozen=True, kw_only=True)
class Move:
    """When the trainer has finished `step`, the pool joins, or drains and leaves."""

    step: int
    pool: PoolPlace
    joins: bool = True


@dataclass
class _Region:
    """A run under way, and its nodes."""

    network: Network
    root: Path
    store: dict[str, Any]
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def move(self, move: Move) -> None:
        """Start the pool's node, or ask it to drain."""
        name = move.pool.name
        with (self.root / "logs" / "node-pools.log").open("a") as log:
            said = {"event": "pool.joined" if move.joins else "pool.left", "pool": name}
            log.write(json.dumps({**said, "timestamp": datetime.now(UTC).isoformat()}) + "\n")
        if not move.joins:
            self.nodes[name].send_signal(signal.SIGTERM)
            return
        if (left := self.nodes.get(name)) is not None:
            try:
                left.wait(timeout=_END_S)
            except subprocess.TimeoutExpired as error:
                raise InternalError(f"{name} had not left {_END_S:.0f} s after it was asked to") from error
        self.nodes[name] = self._start(move.pool)

    def require_nodes(self) -> None:
        """Raise InternalError with the end of the log of a node that failed."""
        for name, node in self.nodes.items():
            if node.poll():
                raise InternalError(
                    f"{name} ended with status {node.returncode}: {self.end_of_log(f'node-{name}')}"
                )

    def end_of_log(self, name: str) -> str:
        """What a process said last."""
        return end_of(self.root / "logs" / f"{name}.log", num_bytes=_TAIL).strip()

    def _start(self, pool: PoolPlace) -> subprocess.Popen[bytes]:
        central, work = link_to(self.network.plan, pool.place).store_address, self.root / "work" / pool.name
        with (self.root / "logs" / f"node-{pool.name}.log").open("ab") as log:
            return self.network.start(
                pool.place,
                *python("astraflow_bench.studies.pools.timed_node", str(pool.speed)),
                *("--join", f"{central}:{_FORWARDED}", "--insecure", "--allow-recipe-code"),
                *("--token-file", str(self.root / "secrets" / "rollout.token")),
                *("--node-id", pool.name, "--pool", pool.name, "--region", pool.place.value),
                *("--work-dir", str(work), "--mirror-dir", str(work / "mirror")),
                stdout=log,
                stderr=log,
                env=self.environment(central),
            )

    def environment(self, central: str) -> dict[str, str]:
        """Of a process that reaches the store at this address."""
        return {
            **os.environ,
            "ASTRAFLOW_STORE_ENDPOINT_URL": f"http://{central}:{self.store['port']}",
            "ASTRAFLOW_STORE_CREDENTIALS_FILE": self.store["credentials_file"],
            "ASTRAFLOW_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": "1",
        }


def run_in_regions(
    cell: Cell, folder: Path, moves: Sequence[Move], stopped: Event
) -> tuple[dict[str, Any], Path]:
    """Run a cell; returns its summary and the folder of the run. Raises PreconditionError for what the machine lacks,
    InternalError with the end of the run's own words, also when `stopped` ended it.
    """
    if missing := missing_tools() or radosgw.missing_programs():
        raise PreconditionError(missing)
    root = (folder / ".astraflow" / "runs" / f"{cell.arm}-{cell.seed}").resolve()
    shutil.rmtree(root, ignore_errors=True)
    cache = (folder / ".astraflow" / "cache").resolve()
    for made in (root / "logs", cache):
        made.mkdir(parents=True, exist_ok=True)
    (root / "cache").symlink_to(cache)  # warm starts are made once for all cells
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        network = stack.enter_context(Network(PLAN, folder=scratch, lifetime_s=_LIFE_S))
        deadline_s = time.monotonic() + _LIFE_S
        roles = stack.enter_context(RoleProcesses(network, folder=root / "logs", deadline_s=deadline_s))
        roles.start("store", Place.STORE, "store_role", folder=str(scratch / "store"), bucket=_BUCKET)
        region = _Region(network, root, roles.wait("store", "ready"))
        run = stack.enter_context(_process(region, "run", *_dev(cell, root)))
        forward = "astraflow_bench.studies.pools.forward"
        stack.enter_context(_process(region, "forward", *python(forward, str(_FORWARDED), str(_PORT))))
        stack.callback(_end, region.nodes)
        return _followed(run, region, moves, stopped, deadline_s=deadline_s), root


def _dev(cell: Cell, root: Path) -> list[str]:
    recipe = str(cell.path.resolve())
    command = [*python("astraflow.cli", "dev", recipe, "--json", "--quiet", "--without", "raas")]
    command += ["--store", f"s3://{_BUCKET}/runs", "--port", str(_PORT), "--data-dir", str(root)]
    return [*command, *(word for item in cell.overrides for word in ("--set", item))]


@contextmanager
def _process(region: _Region, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the central region, which ends with the block."""
    with (region.root / "logs" / f"{name}.log").open("wb") as log:
        process = region.network.start(Place.STORE, *command, stderr=log, env=region.environment("127.0.0.1"))
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=_END_S)


def _followed(
    run: subprocess.Popen[bytes], region: _Region, moves: Sequence[Move], stopped: Event, *, deadline_s: float
) -> dict[str, Any]:
    """Move the pools as steps are finished, until the run has ended."""
    left = sorted(moves, key=lambda move: move.step)
    while run.poll() is None:
        while left and _finished_step(region.root) >= left[0].step:
            region.move(left.pop(0))
        region.require_nodes()
        if time.monotonic() > deadline_s:
            raise InternalError(f"the run had not ended after {_LIFE_S:.0f} s: {region.end_of_log('run')}")
        if stopped.wait(_POLL_S):
            run.kill()
    output, _ = run.communicate(timeout=_END_S)
    if run.returncode:
        raise InternalError(f"the run ended with status {run.returncode}: {region.end_of_log('run')}")
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    return summary


def _finished_step(root: Path) -> int:
    """The newest step; 0 once nodes may join, -1 before."""
    steps = [line["step"] for line in read_lines(root / "metrics.jsonl") if line["kind"] == "step"]
    return max(steps, default=0 if (root / "addresses" / "dataflow.json").exists() else -1)


def _end(nodes: dict[str, subprocess.Popen[bytes]]) -> None:
    for process in nodes.values():
        process.kill()
        process.wait(timeout=_END_S)
