"""`astraflow top`: the runs of a server, full screen and kept up to date; into a pipe, one page and no more.

Invariant: a server that goes away leaves its last figures on the screen, with how old they are and why there are no
newer ones; it is asked again until it answers or the person leaves.
"""

from __future__ import annotations

import threading
import time
from typing import Annotated, ClassVar

import typer
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.top_pages import Look, Looking, pages, whole_page
from astraflow.commands.wording import console, print_json, span_text
from astraflow.errors import AstraflowError

app = typer.Typer(add_completion=False)

PAGES = ("run", "nodes", "why", "runs")
EveryOption = Annotated[
    float, typer.Option("--every", min=0.1, max=60.0, help="Seconds between two looks at the server.")
]


@app.command()
@grouped_options
def top(options: RunOptions, every: EveryOption = 1.0) -> None:
    """Watch the runs of a server: progress, staleness, nodes and pools, what each stage waits for and why.

    Keys: 1 to 4 choose a page, [ and ] the run before and after, p pauses, q leaves. Into a pipe it prints everything
    once.
    """
    with options.client() as client:
        looking = Looking(client, run_id=options.run_id, period_s=every)
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
            self.query_one(f"#page-{name}", Static).update(page)

    def _show_head(self) -> None:
        self.query_one("#head", Static).update(self.head())

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
