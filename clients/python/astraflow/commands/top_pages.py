"""What `astraflow top` shows: one look at a server and a run, and its pages, made of what `status` and `why` show.

Pure but for `Looking`, which asks. Called by `top`, on a terminal and into a pipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from astraflow.client import Client, RetryPolicy
from astraflow.commands.bottleneck import Verdict
from astraflow.commands.runs import all_runs, runs_table
from astraflow.commands.status import (
    evaluation_parts,
    failure_parts,
    node_parts,
    policy_parts,
    stop_parts,
    title_of,
    trajectory_parts,
)
from astraflow.commands.why import judge, why_page
from astraflow.commands.wording import as_json, heading, table
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import NotFoundError

ANSWER_S = 3.0
"""How long an answer is waited for; what comes later counts as silence."""
_LOOKS = 20
"""The newest looks that a verdict rests on."""
_ONCE = RetryPolicy(total_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a server said at one moment; `status`, `why` and `pools` are of the run that is looked at, and unset where
    the server has none.
    """

    runs: tuple[run_pb2.Run, ...]
    run_id: str = ""
    status: pb.StatusResponse = field(default_factory=pb.StatusResponse)
    why: pb.WhyResponse = field(default_factory=pb.WhyResponse)
    pools: pb.PoolReportResponse = field(default_factory=pb.PoolReportResponse)
    verdict: Verdict | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as what `json.dumps` takes, by the rules of `wording`."""
        return {
            "runs": [run.run_id for run in self.runs],
            "status": as_json(self.status),
            "pools": as_json(self.pools),
            "verdict": self.verdict.sentence if self.verdict else None,
        }


class Looking:
    """Asks a server again and again; used by one thread."""

    def __init__(self, client: Client, *, run_id: str = "", period_s: float = 1.0) -> None:
        """`run_id` is the run to look at; empty takes the newest, and another one once that is deleted."""
        self.wanted = run_id
        self._client = client
        self._period_s = period_s
        self._whys: deque[pb.WhyResponse] = deque(maxlen=_LOOKS)

    def look(self) -> Look:
        """Return what the server says now. Raises what it refuses with, RetryableError when it does not answer."""
        runs = tuple(all_runs(self._client))
        known = [run.run_id for run in runs]
        if self.wanted and self.wanted not in known:
            if not known:
                raise NotFoundError(f"the server has no run {self.wanted!r}, and no other")
            self.wanted = ""
        if not runs:
            return Look(runs=())
        run_id = self.wanted or known[-1]
        status = self._ask(self._client.admin.Status, pb.StatusRequest(run_id=run_id))
        why = self._ask(self._client.admin.Why, pb.WhyRequest(run_id=run_id))
        pools = self._ask(self._client.admin.PoolReport, pb.PoolReportRequest(run_id=run_id))
        if self._whys and self._whys[-1].run_id != run_id:
            self._whys.clear()
        self._whys.append(why)
        verdict = judge(list(self._whys), over_s=len(self._whys) * self._period_s)
        return Look(runs=runs, run_id=run_id, status=status, why=why, pools=pools, verdict=verdict)

    def _ask(self, rpc: Any, request: Any) -> Any:  # noqa: ANN401 - any unary rpc
        return self._client.call(rpc, request, timeout_s=ANSWER_S, retry=_ONCE)


def pages(look: Look, *, width: int = 160) -> Mapping[str, RenderableType]:
    """Return each page by its name, for a terminal of `width` columns."""
    if not look.runs:
        nothing = Text(
            "the server has no run; start one: astraflow dev RECIPE, or astraflow runs create RECIPE"
        )
        return dict.fromkeys(("run", "nodes", "why", "runs"), nothing)
    return {
        "run": _run_page(look, width=width),
        "nodes": _nodes_page(look),
        "why": why_page(look.why, look.verdict) if look.verdict else Text(""),
        "runs": runs_table(look.runs),
    }


def whole_page(look: Look) -> RenderableType:
    """Return everything on one page, for a pipe."""
    shown = pages(look)
    if not look.runs:
        return shown["run"]
    return Group(shown["runs"], Text(""), shown["run"], shown["nodes"], Text(""), shown["why"])


def _run_page(look: Look, *, width: int) -> RenderableType:
    status = look.status
    verdict = [Text(look.verdict.sentence, style="bold")] if look.verdict else []
    failed = [
        *stop_parts(status.stopped_for),
        *failure_parts(status.failures, dead_letters=status.dead_letters),
    ]
    return Group(
        title_of(status),
        *verdict,
        *failed,
        *policy_parts(status, width=width),
        *trajectory_parts(status),
        *evaluation_parts(status),
    )


def _nodes_page(look: Look) -> RenderableType:
    shown = table("pool", "nodes", "busy", "of", right=("nodes", "busy", "of"))
    for pool in look.pools.pools:
        shown.add_row(pool.pool or "(none)", str(pool.nodes), str(pool.leases), str(pool.capacity))
    nodes = node_parts(look.status) or [Text("  no node has joined yet")]
    leasable = Text(f"  tasks that could be leased now: {look.pools.leasable_tasks}", style="dim")
    return Group(heading("pools"), shown, leasable, *nodes)
