"""`astraflow why`: what each stage waits for, since when, what would release it, and what the run is bound by."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from astraflow.client import Client, RetryPolicy
from astraflow.commands.bottleneck import Bound, Verdict, find_bottleneck, find_failure
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.status import data_parts, failure_parts
from astraflow.commands.waits import in_order, server_wait
from astraflow.commands.wording import (
    as_json,
    console,
    enum_text,
    print_json,
    seconds_of,
    span_text,
)
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import AstraflowError, DeadlineError, UnavailableError

app = typer.Typer(add_completion=False)

NO_SERVER = 75
"""Exit status when no server answered."""

_LOOKS_PER_S = 4.0
_PATIENCE_S, _ANSWER_S = 2.0, 3.0
"""A server that answers at all tells within three seconds, whatever its Redis does."""
_STAGES = {
    "server": "everything",
    "data": "everything that must be written",
    "access": "letting callers in",
    "lease": "handing out tasks",
    "assemble": "completing groups",
    "batch": "training",
    "publish": "publishing",
    "activate": "activating versions",
    "evaluate": "evaluating",
}
_COLOURS = {Bound.FAILING: "red", Bound.BLOCKED: "red", Bound.BALANCED: "green", Bound.FINISHED: "green"}

SecondsOption = Annotated[
    float,
    typer.Option(
        "--seconds", min=0.0, max=600.0, help="How long to watch before saying what limits the run."
    ),
]


@app.command()
@grouped_options
def why(
    options: RunOptions,
    seconds: SecondsOption = 3.0,
) -> None:
    """Say what each stage waits for, for how long, what would end the wait, and what limits the run."""
    server, asked_s = options.server(), time.monotonic()
    try:
        with options.client(patience_s=_PATIENCE_S, server=server) as client:
            looks = list(look(client, run_id=options.run_id, for_s=seconds))
    except (UnavailableError, DeadlineError) as error:
        if error.retry_after_s is not None:  # a server said so
            raise
        silent_s = max(time.monotonic() - asked_s, server.unheard_s())
        said = error.__cause__ if isinstance(error.__cause__, AstraflowError) else error
        wait = server_wait(server.address, said, silent_s=silent_s)
        answer = pb.WhyResponse(run_id=options.run_id, waits=[wait])
        _show(options, answer, judge([answer], over_s=0.0))
        raise typer.Exit(NO_SERVER) from error
    _show(options, looks[-1], judge(looks, over_s=seconds))


def _show(options: RunOptions, answer: pb.WhyResponse, verdict: Verdict) -> None:
    if options.json_:
        print_json({"verdict": asdict(verdict), **as_json(answer)})
    else:
        console().print(why_page(answer, verdict))


def look(client: Client, *, run_id: str, for_s: float) -> Iterator[pb.WhyResponse]:
    """Ask several times within `for_s` seconds; once when the first answer already tells."""
    request = pb.WhyRequest(run_id=run_id)
    until_s = time.monotonic() + for_s
    while True:
        answer = client.call(client.admin.Why, request, timeout_s=_ANSWER_S, retry=RetryPolicy(total_s=0.0))
        yield answer
        certain = judge([answer], over_s=0.0).bound in (Bound.FAILING, Bound.BLOCKED, Bound.FINISHED)
        if certain or time.monotonic() + 1 / _LOOKS_PER_S > until_s:
            return
        time.sleep(1 / _LOOKS_PER_S)


def judge(looks: list[pb.WhyResponse], *, over_s: float) -> Verdict:
    """Return what bounds the run: failures before all else."""
    failing = find_failure(looks[-1].failures, stopped_for=looks[-1].stopped_for)
    if failing is not None:
        return failing
    if looks[-1].state == run_pb2.RUN_STATE_FINISHED:
        return Verdict(bound=Bound.FINISHED, share=1.0, looks=len(looks), because="the run has ended")
    return find_bottleneck([look.waits for look in looks], over_s=over_s)


def why_page(answer: pb.WhyResponse, verdict: Verdict) -> RenderableType:
    """Return the verdict, and the reasons for it."""
    state = enum_text(run_pb2.RunState.DESCRIPTOR, answer.state)
    title = Text.assemble((f"run {answer.run_id}", "bold"), f" is {state}\n" if answer.state else "\n")
    line = Text(verdict.sentence, style=f"bold {_COLOURS.get(verdict.bound, 'yellow')}")
    return Group(title, line, *reason_parts(answer))


def reason_parts(answer: pb.StatusResponse | pb.WhyResponse) -> list[RenderableType]:
    """Return what failed, one block per wait, the most urgent first, and who waits for whom."""
    blocks = [block for wait in in_order(answer.waits) for block in _block(wait)]
    if not blocks and answer.state != run_pb2.RUN_STATE_FINISHED:
        blocks = [Text("\nnothing waits at this moment")]
    balances = [Text(f"\n{each.policy_id}: {each.sentence}") for each in answer.balances]
    failed = failure_parts(answer.failures, dead_letters=answer.dead_letters)
    return [*failed, *blocks, *balances, *data_parts(answer)]


def _block(wait: pb.Wait) -> tuple[RenderableType, ...]:
    stage = _STAGES.get(wait.stage, wait.stage)
    whose = f" {wait.policy_id}" if wait.policy_id else ""
    since = span_text(seconds_of(wait.waited_duration))
    title = Text.assemble("\n", (f"{stage}{whose}", "bold"), f" has waited {since}: {wait.reason}")
    released = [_indented(f"next: {wait.released_by}")] if wait.released_by else []
    return (title, _indented(wait.detail), *released)


def _indented(text: str) -> RenderableType:
    return Text(f"  {text}")
