"""`astraflow autoscale`: a command of the user's resizes a pool to what the run needs; docs/autoscaling.md."""

import asyncio
import signal
from collections.abc import Callable
from typing import Annotated

import typer

from astraflow.client import AsyncClient
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.wording import print_json, say
from astraflow.connecting.connection import Connection
from astraflow_kit.log import configure
from astraflow_launcher.scaling.command_hook import CommandHook
from astraflow_launcher.scaling.following import PoolFollower, Resized

app = typer.Typer(add_completion=False)


@app.command()
@grouped_options
def autoscale(
    options: RunOptions,
    pool: Annotated[str, typer.Option(help="Pool of `raas.autoscaling` to resize.")],
    command: Annotated[
        str,
        typer.Option(metavar="COMMAND", help="Program with arguments; the number of nodes comes after them."),
    ],
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, max=3600, help="Time that it may take.")
    ] = 120.0,
    every_s: Annotated[float, typer.Option("--every-s", min=0.1, max=3600, help="Between two looks.")] = 5.0,
) -> None:
    """Run COMMAND N whenever POOL should have N nodes, until this command is ended or the run is deleted.

    A command that fails or hangs is reported and tried again, ever later. N is 0 once the run has finished.
    """
    configure("autoscale")
    hook = CommandHook.parse(command, timeout_s=timeout_s)
    with options.client() as client:  # a server that is not there, or another run, is refused at once
        connection = client.connection

    def tell(resized: Resized) -> None:
        if options.json_:
            print_json({"pool": pool, **vars(resized)})
        else:
            say(f"{pool}: {resized.nodes} nodes ({resized.problem or resized.reason})")

    asyncio.run(_follow(connection, hook, run_id=options.run_id, pool=pool, every_s=every_s, tell=tell))


async def _follow(
    connection: Connection,
    hook: CommandHook,
    *,
    run_id: str,
    pool: str,
    every_s: float,
    tell: Callable[[Resized], None],
) -> None:
    until = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, until.set)
    async with AsyncClient(connection) as client:
        follower = PoolFollower(client, hook, run_id=run_id, pool=pool, period_s=every_s, tell=tell)
        await follower.run(until)
