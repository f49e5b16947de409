"""The `astraflow` command: names its subcommands by module path and loads only the one that runs.

Invariant: `astraflow --help` imports none of torch, grpc, numpy or redis, and no service package. Each
subcommand is a `typer.Typer` named here; adding one is adding a line to `COMMANDS`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from astraflow import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

USAGE_ERROR = 2


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand lives, what it does, and the extra that brings its dependencies."""

    module: str
    summary: str
    extra: str
    panel: str


_START, _LOOK, _OPERATE, _DAEMONS = "Start here", "What is it doing?", "Operate it", "Daemons"

COMMANDS: dict[str, Subcommand] = {
    "dev": Subcommand(
        "astraflow_launcher.commands.dev", "Run a recipe on this machine and watch it learn.", "dev", _START
    ),
    "eval": Subcommand(
        "astraflow_launcher.commands.eval", "Score a model or a version on held-out tasks.", "dev", _START
    ),
    "doctor": Subcommand(
        "astraflow_launcher.commands.doctor", "Check this machine and suggest fixes.", "dev", _START
    ),
    "recipe": Subcommand(
        "astraflow.recipe.command", "Make a recipe, check it, show or compare it.", "", _START
    ),
    "status": Subcommand("astraflow.commands.status", "Show what a run has done and holds.", "", _LOOK),
    "top": Subcommand("astraflow.commands.top", "Watch a server's runs, full screen.", "top", _LOOK),
    "why": Subcommand("astraflow.commands.why", "Say what each stage waits for, and why.", "", _LOOK),
    "trace": Subcommand("astraflow.commands.trace", "Follow one task to its weights.", "", _LOOK),
    "samples": Subcommand("astraflow.commands.samples", "Look at what was trained on or dropped.", "", _LOOK),
    "support-bundle": Subcommand(
        "astraflow_launcher.commands.support_bundle", "Pack what a report needs.", "dev", _LOOK
    ),
    "nodes": Subcommand(
        "astraflow.commands.nodes", "List nodes, drain one, or take that back.", "", _OPERATE
    ),
    "dead-letters": Subcommand(
        "astraflow.commands.dead_letters", "Requeue or delete failed tasks.", "", _OPERATE
    ),
    "evaluations": Subcommand(
        "astraflow.commands.evaluations", "Ask for an evaluation, or see one.", "", _OPERATE
    ),
    "runs": Subcommand("astraflow.commands.runs", "Create, follow and end runs.", "", _OPERATE),
    "autoscale": Subcommand(
        "astraflow_launcher.commands.autoscale", "Let a command resize a pool of nodes.", "tools", _OPERATE
    ),
    "ca": Subcommand("astraflow_launcher.commands.ca", "Issue certificates of your own.", "tools", _OPERATE),
    "token": Subcommand("astraflow_launcher.commands.token", "Issue and read tokens.", "tools", _OPERATE),
    "join-token": Subcommand(
        "astraflow_launcher.commands.join_token", "Let a node join with one line.", "tools", _OPERATE
    ),
    "secrets": Subcommand("astraflow_launcher.commands.secrets", "Make a box's secrets.", "tools", _OPERATE),
    "health": Subcommand(
        "astraflow_launcher.commands.health", "Ask a daemon here if it works.", "", _OPERATE
    ),
    "weights": Subcommand(
        "astraflow_weights.tools.commands", "Verify, export and pin versions.", "raas", _OPERATE
    ),
    "bench": Subcommand(
        "astraflow_bench.commands.bench",
        "Measure what the weight path costs on this machine.",
        "bench",
        _LOOK,
    ),
    "study": Subcommand(
        "astraflow_bench.commands.study", "Measure a claim again, over seeds and arms.", "bench", _LOOK
    ),
    "dataflow": Subcommand("astraflow_dataflow.__main__", "Start a dataflow server.", "dataflow", _DAEMONS),
    "raas": Subcommand("astraflow_raas.__main__", "Start a RaaS node and join a run.", "raas", _DAEMONS),
    "trainer": Subcommand("astraflow_trainer.__main__", "Start a policy's trainer.", "trainer", _DAEMONS),
    "environment": Subcommand(
        "astraflow_environment.__main__", "Serve an environment to nodes.", "environment", _DAEMONS
    ),
    "engine": Subcommand("astraflow_engine.__main__", "Start the CPU inference engine.", "engine", _DAEMONS),
}


class _LazyGroup(TyperGroup):
    """Lists subcommands from the table and imports one only when it is invoked."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's vendored context type is private
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        found = COMMANDS.get(cmd_name)
        if found is None:
            return None
        return TyperCommand(cmd_name, help=found.summary, rich_help_panel=found.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        name = args[0]
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(COMMANDS)}"
            ctx.fail(f"no command {name!r}; {hint}")
        return name, typer.main.get_command(_load(name)), args[1:]


def _load(name: str) -> typer.Typer:
    command = COMMANDS[name]
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == command.module.split(".")[0]:
            raise
        wanted = f"'astraflow[{command.extra}]'" if command.extra else "astraflow"
        typer.echo(
            f"`astraflow {name}` needs the package {error.name!r}, which is not installed; "
            f"run: pip install {wanted}",
            err=True,
        )
        raise typer.Exit(USAGE_ERROR) from error
    app: typer.Typer = module.app
    return app


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback signature
    if wanted:
        typer.echo(f"astraflow {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(  # noqa: FBT001
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Reinforcement learning for agentic language models, as three services.

    New here? Run `astraflow dev`, then `astraflow recipe init NAME`.
    """


def main() -> None:
    """Entry point of the console script. Known errors end with their message and a status, never a
    traceback.
    """
    # The error tree is only needed on the way out, and it costs nothing to import.
    from astraflow.errors import AstraflowError

    run: Callable[[], object] = app
    try:
        run()
    except AstraflowError as error:
        from astraflow._contract.printable import printable

        typer.echo(printable(f"{error.reason}: {error.message}"), err=True)
        sys.exit(_exit_status(error))


def _exit_status(error: Exception) -> int:
    from astraflow import errors

    if isinstance(error, errors.RetryableError):
        return 75
    return USAGE_ERROR if isinstance(error, errors.RequestError) else 1


if __name__ == "__main__":
    main()
