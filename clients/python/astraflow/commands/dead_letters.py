"""`astraflow dead-letters`: failed tasks that will not be retried; list, requeue or delete them."""

from typing import Annotated

import typer

from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.wording import as_json, console, print_json, say, table
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import InvalidArgumentError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, requeue or delete failed tasks.")

LetterArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[LETTER]...", help="Letters, by the ids that `list` shows.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Every letter instead of named ones.")]


@app.command("list")
@grouped_options
def list_(
    options: RunOptions,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Show at most this many, the oldest.")] = 50,
    tasks: Annotated[bool, typer.Option("--tasks", help="With --json: the tasks as submitted, too.")] = False,
) -> None:
    """List failed tasks that will not be retried, oldest first, and why."""
    request = pb.ListDeadLettersRequest(run_id=options.run_id, page_size=limit, include_tasks=tasks)
    with options.client() as client:
        answer = client.call(client.admin.ListDeadLetters, request)
    if options.json_:
        print_json(as_json(answer))
        return
    if not answer.dead_letters:
        say("no dead letters")
        return
    shown = table("letter", "task", "reason", "attempt", "node", "detail", right=("attempt",))
    for letter in answer.dead_letters:
        cells = (letter.dead_letter_id, letter.task_id, letter.reason, str(letter.attempt), letter.node_id)
        shown.add_row(*cells, letter.detail)
    console().print(shown)
    if answer.total > len(answer.dead_letters):
        say(f"and {answer.total - len(answer.dead_letters)} more; --limit shows up to 500")


@app.command()
@grouped_options
def requeue(
    options: RunOptions,
    letters: LetterArguments = None,
    all_: AllOption = False,
) -> None:
    """Put failed tasks back into the training queue, with all their episodes open."""
    request = pb.RequeueDeadLettersRequest(run_id=options.run_id, dead_letter_ids=_chosen(letters, all_=all_))
    with options.client() as client:
        answer = client.call(client.admin.RequeueDeadLetters, request)
    options.show(
        answer, lambda it: f"{it.requeued} requeued, {it.unknown} unknown, {it.kept} kept as they are"
    )


@app.command()
@grouped_options
def purge(
    options: RunOptions,
    letters: LetterArguments = None,
    all_: AllOption = False,
) -> None:
    """Delete failed tasks."""
    request = pb.PurgeDeadLettersRequest(run_id=options.run_id, dead_letter_ids=_chosen(letters, all_=all_))
    with options.client() as client:
        answer = client.call(client.admin.PurgeDeadLetters, request)
    options.show(answer, lambda it: f"{it.purged} deleted")


def _chosen(letters: list[str] | None, *, all_: bool) -> list[str]:
    """The ids to send; none means all. Raises InvalidArgumentError unless exactly one way was used."""
    if bool(letters) == all_:
        raise InvalidArgumentError(
            "name letters (`astraflow dead-letters list` shows their ids), or give --all"
        )
    return letters or []
