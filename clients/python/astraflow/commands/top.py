"""`astraflow top`: the runs of a server, full screen and kept up to date; into a pipe, one page and no more.

Invariant: a server that goes away leaves its last figures on the screen, with how old they are and why there are no
newer ones; it is asked again until it answers or the person leaves.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from astraflow.client import Client, RetryPolicy
from astraflow.commands.options import grouped_options
from astraflow.commands.runs import all_runs, runs_table
from astraflow.commands.server import RunOptions
from astraflow.commands.status import (
    evaluation_parts,
    failure_parts,
    node_parts,
    policy_parts,
    stop_parts,
    title_of,
    trajectory_parts,
)
from astraflow.commands.why import reason_parts
from astraflow.commands.wording import (
    Printable,
    as_json,
    console,
    heading,
    print_json,
    span_text,
    sparkline,
    table,
)
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import AstraflowError, NotFoundError

app = typer.Typer(add_completion=False)

PAGES = ("run", "steps", "nodes", "why", "events", "runs")
STEP_FIGURES = (
    "reward_mean", "reward_p10", "reward_p50", "reward_p90", "num_zero_variance_groups", "truncated_fraction",
    "loss", "entropy", "grad_norm", "mismatch_kl", "ratio_p99", "clip_fraction_up", "clip_fraction_down",
    "staleness_mean", "staleness_in_flight_mean", "staleness_in_queue_mean", "data.ready", "data.outstanding",
    "turns_mean", "completion_tokens_mean", "completion_tokens_p50", "completion_tokens_max",
    "wait_s", "train_s", "publish_wait_s", "learning_rate",
)  # fmt: skip
"""What is shown of steps, in this order, by the names that trainers and the server give."""
_POINTS, _EVENTS = 40, 30
EveryOption = Annotated[
    float, typer.Option("--every", min=0.1, max=60.0, help="Seconds between two looks at the server.")
]
ANSWER_S = 3.0
"""How long an answer is waited for; what comes later counts as silence."""
_ONCE = RetryPolicy(total_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a server said at one moment; all but `runs` is of the run that is looked at, `steps` by policy."""

    runs: tuple[run_pb2.Run, ...]
    run_id: str = ""
    status: pb.StatusResponse = field(default_factory=pb.StatusResponse)
    pools: pb.PoolReportResponse = field(default_factory=pb.PoolReportResponse)
    steps: Mapping[str, pb.ListStepsResponse] = field(default_factory=dict)
    events: pb.ListEventsResponse = field(default_factory=pb.ListEventsResponse)

    def as_json(self) -> dict[str, Any]:
        """Return it as what `json.dumps` takes, by the rules of `wording`."""
        return {
            "runs": [run.run_id for run in self.runs],
            "status": as_json(self.status),
            "pools": as_json(self.pools),
            "steps": {policy_id: as_json(steps) for policy_id, steps in self.steps.items()},
            "events": as_json(self.events),
        }


class Looking:
    """Asks a server again and again; used by one thread."""

    def __init__(self, client: Client, *, run_id: str = "") -> None:
        """`run_id` is the run to look at; empty takes the newest, and another one once that is deleted."""
        self.wanted = run_id
        self._client = client

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
        pools = self._ask(self._client.admin.PoolReport, pb.PoolReportRequest(run_id=run_id))
        steps = {each.policy_id: self._steps(run_id, each.policy_id) for each in status.policies}
        wanted = pb.ListEventsRequest(run_id=run_id, page_size=_EVENTS)
        events = self._ask(self._client.admin.ListEvents, wanted)
        return Look(runs=runs, run_id=run_id, status=status, pools=pools, steps=steps, events=events)

    def _steps(self, run_id: str, policy_id: str) -> pb.ListStepsResponse:
        wanted = pb.ListStepsRequest(
            run_id=run_id, policy_id=policy_id, names=STEP_FIGURES, max_points=_POINTS
        )
        steps: pb.ListStepsResponse = self._ask(self._client.admin.ListSteps, wanted)
        return steps

    def _ask(self, rpc: Any, request: Any) -> Any:  # noqa: ANN401 - any unary rpc
        return self._client.call(rpc, request, timeout_s=ANSWER_S, retry=_ONCE)


def pages(look: Look, *, width: int = 160) -> Mapping[str, RenderableType]:
    """Return each page by its name, for a terminal of `width` columns."""
    if not look.runs:
        nothing = Text(
            "the server has no run; start one: astraflow dev RECIPE, or astraflow runs create RECIPE"
        )
        return dict.fromkeys(PAGES, nothing)
    return {
        "run": _run_page(look, width=width),
        "steps": Group(*(part for policy in look.steps.items() for part in _step_parts(*policy))),
        "nodes": _nodes_page(look),
        "why": Group(title_of(look.status), *reason_parts(look.status)),
        "events": _events_page(look),
        "runs": runs_table(look.runs),
    }


def whole_page(look: Look) -> RenderableType:
    """Return everything on one page, for a pipe."""
    shown = pages(look)
    if not look.runs:
        return shown["run"]
    return Group(*(part for name in ("runs", *PAGES[:-1]) for part in (shown[name], Text(""))))


def _run_page(look: Look, *, width: int) -> RenderableType:
    status = look.status
    balances = [Text(f"{each.policy_id} is {each.sentence}", style="bold") for each in status.balances]
    failed = [
        *stop_parts(status.stopped_for),
        *failure_parts(status.failures, dead_letters=status.dead_letters),
    ]
    return Group(
        title_of(status),
        *balances,
        *failed,
        *policy_parts(status, width=width),
        *trajectory_parts(status),
        *evaluation_parts(status),
    )


def _step_parts(policy_id: str, steps: pb.ListStepsResponse) -> list[RenderableType]:
    """The newest value of each figure, and how it came there, by points of as many steps each."""
    if not steps.steps:
        return [heading(policy_id), Text("  no step has finished yet")]
    shown = table("figure", "newest", "least", "most", "so far", right=("newest", "least", "most"))
    for series in sorted(steps.series, key=lambda series: STEP_FIGURES.index(series.name)):
        known = [value for value in series.mean if not math.isnan(value)]
        if known:
            least, most = min(known), max(known)
            cells = (f"{value:.4g}" for value in (known[-1], least, most))
            shown.add_row(series.name, *cells, sparkline(series.mean, width=_POINTS, low=least, high=most))
    note = Text(f"  until step {steps.steps[-1]}, {steps.total} steps", style="dim")
    return [heading(policy_id), shown, note]


def _events_page(look: Look) -> RenderableType:
    shown = table("time (UTC)", "what", "who", "")
    for event in look.events.events:
        when = event.time.ToDatetime().strftime("%m-%d %H:%M:%S")
        shown.add_row(when, event.kind.replace("_", " "), event.subject, event.detail)
    return shown


def _nodes_page(look: Look) -> RenderableType:
    shown = table("pool", "nodes", "busy", "of", right=("nodes", "busy", "of"))
    for pool in look.pools.pools:
        shown.add_row(pool.pool or "(none)", str(pool.nodes), str(pool.leases), str(pool.capacity))
    nodes = node_parts(look.status) or [Text("  no node has joined yet")]
    leasable = Text(f"  tasks that could be leased now: {look.pools.leasable_tasks}", style="dim")
    return Group(heading("pools"), shown, leasable, *nodes)


@app.command()
@grouped_options
def top(options: RunOptions, every: EveryOption = 1.0) -> None:
    """Watch the runs of a server: progress, steps, nodes and pools, what each stage waits for and why, what happened.

    Keys: 1 to 6 choose a page, [ and ] the run before and after, p pauses, q leaves. Into a pipe it prints everything
    once.
    """
    with options.client() as client:
        looking = Looking(client, run_id=options.run_id)
        first = looking.look()
        if options.json_:
            print_json(first.as_json())
        elif console().is_terminal:
            Top(looking, first, address=client.address, every_s=every).run()
        else:
            console().print(whole_page(first))


class Top(App[None]):
    """The screen. A thread asks the server; what it finds is shown by the app's own."""

    TITLE = "astraflow top"
    ENABLE_COMMAND_PALETTE = False
    CSS = "#head { height: auto; max-height: 3; } TabPane { padding: 0; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show('{name}')", name) for number, name in enumerate(PAGES, 1)),
        Binding("left_square_bracket", "other_run(-1)", "run before"),
        Binding("right_square_bracket", "other_run(1)", "after"),
        Binding("p", "pause", "pause"),
        Binding("q", "quit", "leave"),
    ]

    def __init__(self, looking: Looking, first: Look, *, address: str, every_s: float) -> None:
        super().__init__()
        self._looking = looking
        self._address = address
        self._every_s = every_s
        self._look, self._looked_s = first, time.monotonic()
        self._silence = ""
        """Why the server does not answer; empty while it does."""
        self._num_losses = 0
        self._paused = False
        self._wanted = threading.Event()
        """Set when the next look should not wait."""

    def compose(self) -> ComposeResult:
        """One line about the server, a page below it, the keys at the bottom."""
        yield Static(id="head")
        with TabbedContent(initial=PAGES[0]):
            for name in PAGES:
                with TabPane(name, id=name), VerticalScroll():
                    yield Static(id=f"page-{name}")
        yield Footer()

    def on_mount(self) -> None:
        """Show the first look, then ask."""
        self._show()
        self.set_interval(1.0, self._show_head)
        self._follow()

    def on_resize(self) -> None:
        """Lay the pages out anew."""
        self._show()

    def on_unmount(self) -> None:
        """Let the thread end at once."""
        self._paused = True
        self._wanted.set()

    def action_show(self, name: str) -> None:
        """Choose a page, and scroll it with the keys."""
        self.query_one(TabbedContent).active = name
        self.query_one(f"#{name} VerticalScroll").focus()

    def action_other_run(self, step: int) -> None:
        """Look at the run before or after this one."""
        known = [run.run_id for run in self._look.runs]
        if self._look.run_id in known:
            place = known.index(self._look.run_id) + step
            self._looking.wanted = known[place % len(known)]
            self._wanted.set()

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._paused = not self._paused
        self._wanted.set()
        self._show_head()

    @work(thread=True, exclusive=True)
    def _follow(self) -> None:
        while self.is_running:
            self._wanted.wait(self._every_s)
            self._wanted.clear()
            if self._paused:
                continue
            try:
                found, silence = self._looking.look(), ""
            except AstraflowError as error:
                found, silence = None, error.message
            if self.is_running:
                self.call_from_thread(self._found, found, silence)

    def _found(self, look: Look | None, silence: str) -> None:
        if look is None:
            self._num_losses += not self._silence
            self._silence = silence
            self._show_head()
            return
        self._look, self._looked_s, self._silence = look, time.monotonic(), ""
        self._show()

    def _show(self) -> None:
        self._show_head()
        for name, page in pages(self._look, width=self.size.width).items():
            self._put(f"#page-{name}", Printable(page))

    def _show_head(self) -> None:
        self._put("#head", self.head())

    def _put(self, selector: str, text: RenderableType) -> None:
        # While the screen is taken down the clock still ticks, and there is nothing left to write on.
        for place in self.query(selector).results(Static):
            place.update(text)

    def head(self) -> Text:
        """Return the line about the server: who it is, whether it answers, how old the figures are."""
        place = f"{self._look.run_id or 'no run'} at {self._address}"
        age = span_text(time.monotonic() - self._looked_s)
        if self._silence:
            said = (
                f"{place} · THE SERVER DOES NOT ANSWER, asking again; figures are {age} old: {self._silence}"
            )
            return Text(said, style="bold red")
        if self._paused:
            return Text(f"{place} · paused, figures are {age} old; p goes on", style="yellow")
        again = f" · answers again, it was away {self._num_losses} times" if self._num_losses else ""
        return Text(f"{place} · live{again}", style="bold")
