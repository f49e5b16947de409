"""`astraflow evaluations`: ask for an evaluation, list those there are, show what one found, cancel one."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.client import Client
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.wording import as_json, console, enum_text, number_text, print_json, say, table
from astraflow.dataflow.v1 import evaluation_service_pb2 as pb
from astraflow.errors import InvalidArgumentError
from astraflow.rollout.v1 import task_pb2

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Ask for an evaluation, list, show or cancel them."
)

_PAGE = 1000
_LOOK_S = 1.0
_OVER = (
    pb.EVALUATION_STATE_COMPLETE,
    pb.EVALUATION_STATE_GIVEN_UP,
    pb.EVALUATION_STATE_CANCELLED,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The evaluation, as `list` shows it.")]


@app.command()
@grouped_options
def request(
    options: RunOptions,
    name: Annotated[str, typer.Option(help="What to call it. Default: a new name.")] = "",
    version: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY=N",
            help="Evaluate this version, which must be the newest. Default: the newest when its turn comes.",
        ),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Own tasks, one JSON object a line: {"id": …, "prompt": … or "messages": […], "data": {…}, '
            '"source": …}. Default: held-out tasks of the data set.',
        ),
    ] = None,
    num_tasks: Annotated[
        int, typer.Option(min=0, help="Held-out tasks. Default: the recipe's num_samples.")
    ] = 0,
    samples: Annotated[int, typer.Option(min=0, help="Samples of each task. Default: the recipe's.")] = 0,
    wait: Annotated[bool, typer.Option("--wait", help="Then wait until it is over, and show it.")] = False,
) -> None:
    """Ask for an evaluation beside the training of a run, on its nodes.

    Example: astraflow evaluations request --tasks mine.jsonl --samples 8 --wait
    """
    asked = pb.RequestEvaluationRequest(
        run_id=options.run_id,
        evaluation_id=name or f"request-{secrets.token_hex(4)}",
        versions=dict(map(_policy_version, version or ())),
        tasks=_own_tasks(tasks) if tasks else (),
        num_tasks=num_tasks,
        samples_per_task=samples,
    )
    with options.client() as client:
        found = client.call(client.evaluations.RequestEvaluation, asked).evaluation
        while wait and found.state not in _OVER:
            time.sleep(_LOOK_S)
            found = _found(client, options.run_id, found.evaluation_id).evaluation
        if wait:
            _show(options, _found(client, options.run_id, found.evaluation_id))
            return
    options.show(found, _pass_text)


@app.command("list")
@grouped_options
def list_(options: RunOptions) -> None:
    """List the evaluations of a run, newest first; those that wait for their turn too."""
    asked = pb.ListEvaluationsRequest(run_id=options.run_id, page_size=_PAGE)
    with options.client() as client:
        pages = client.pages(client.evaluations.ListEvaluations, asked)
        found = [item for page in pages for item in page.evaluations]
    if options.json_:
        print_json([as_json(item) for item in found])
        return
    if not found:
        say("no evaluation yet; ask for one: astraflow evaluations request")
        return
    shown = table("evaluation", "state", "versions", "samples", "failed", "mean reward", right=("failed",))
    for item in found:
        rewards = (f"{policy.policy_id} {number_text(policy.mean_reward)}" for policy in item.policies)
        samples = f"{item.num_done} of {item.num_planned}"
        shown.add_row(
            *(item.evaluation_id, _state(item), _versions_text(item.versions), samples, str(item.num_failed)),
            ", ".join(rewards) or "–",
        )
    console().print(shown)


@app.command()
@grouped_options
def show(options: RunOptions, name: NameArgument) -> None:
    """Show the scores of an evaluation; with --json the result of every sample too."""
    with options.client() as client:
        _show(options, _found(client, options.run_id, name))


@app.command()
@grouped_options
def cancel(options: RunOptions, name: NameArgument) -> None:
    """Cancel an evaluation that was asked for; the results that it has are kept."""
    asked = pb.CancelEvaluationRequest(run_id=options.run_id, evaluation_id=name)
    with options.client() as client:
        options.show(client.call(client.evaluations.CancelEvaluation, asked).evaluation, _pass_text)


def _found(client: Client, run_id: str, name: str) -> pb.GetEvaluationResponse:
    """The evaluation with all its tasks."""
    asked = pb.GetEvaluationRequest(run_id=run_id, evaluation_id=name, page_size=_PAGE)
    whole = pb.GetEvaluationResponse()
    for page in client.pages(client.evaluations.GetEvaluation, asked):
        tasks = [*whole.tasks, *page.tasks]
        whole = page
        del whole.tasks[:]
        whole.tasks.extend(tasks)
    return whole


def _show(options: RunOptions, found: pb.GetEvaluationResponse) -> None:
    if not options.json_:
        say(_pass_text(found.evaluation))
    if options.json_ or found.scores:
        options.show(found, _score_table)


def _score_table(found: pb.GetEvaluationResponse) -> Table:
    each = found.evaluation.samples_per_task
    largest = f"pass@{each}"
    numbers = ("tasks", "samples", f"avg@{each}", largest, "truncated")
    shown = table("policy", "source", *numbers, right=numbers)
    for score in found.scores:
        passed = {f"pass@{item.k}": item.value for item in score.pass_at_k}
        shown.add_row(
            *(score.policy_id, score.source or "all", str(score.num_tasks), str(score.num_samples)),
            number_text(score.avg_at_k),
            number_text(passed[largest]) if largest in passed else "–",
            f"{score.truncated_fraction:.1%}",
        )
    return shown


def _pass_text(found: pb.EvaluationPass) -> str:
    reason = f" ({found.reason})" if found.reason else ""
    return (
        f"evaluation {found.evaluation_id} is {_state(found)}{reason}: {_versions_text(found.versions)}, "
        f"{found.num_done} of {found.num_planned} samples"
    )


def _state(found: pb.EvaluationPass) -> str:
    return enum_text(pb.EvaluationState.DESCRIPTOR, found.state)


def _versions_text(versions: Mapping[str, int]) -> str:
    return ", ".join(f"{policy_id} {versions[policy_id]}" for policy_id in sorted(versions)) or "newest"


def _policy_version(text: str) -> tuple[str, int]:
    policy_id, _, number = text.partition("=")
    if not policy_id or not number.isdigit():
        raise InvalidArgumentError(f"--version {text!r}: give POLICY=N, such as solver=7")
    return policy_id, int(number)


def _own_tasks(path: Path) -> list[task_pb2.Task]:
    """The tasks of a file. Raises InvalidArgumentError with the line that cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--tasks {path}: {error}") from error
    tasks = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_task(json.loads(line)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{path}:{number}: {type(error).__name__}: {error}; each line is an object with `id`, `prompt` or "
                "`messages` (role and content), and if you like `data` and `source`"
            ) from error
    if not tasks:
        raise InvalidArgumentError(f"--tasks {path}: the file has no task")
    return tasks


def _task(line: dict[str, object]) -> task_pb2.Task:
    known = {"id", "prompt", "messages", "data", "source"}
    if unknown := set(line) - known:
        raise ValueError(f"unknown key {min(unknown)!r}")
    messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
    return task_pb2.Task(
        task_id=line["id"],  # type: ignore[arg-type]
        messages=[task_pb2.Message(**item) for item in messages],  # type: ignore[attr-defined]
        data_json=json.dumps(line.get("data", {})).encode(),
        source=line.get("source", ""),  # type: ignore[arg-type]
    )
