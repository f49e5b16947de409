"""`python -m astraflow_trainer` and `astraflow trainer`: options, checks, start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from astraflow_kit import lifecycle
from astraflow_kit.settings import load
from astraflow_trainer.settings import TrainerSettings, load_rank_settings

app = typer.Typer(add_completion=False)


@app.command()
def trainer(
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The dataflow server.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Run to join. Default: the only one.")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy to train. Default: the only one.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Last step to take. Default: the recipe's run.steps.")
    ] = None,
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints and the ledger; a restart resumes from it.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for warm starts that runs share.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token for the server.")] = None,
    store_endpoint_url: Annotated[
        str | None, typer.Option(help="Address of the S3-compatible weight store. Default: AWS.")
    ] = None,
    store_region: Annotated[
        str | None, typer.Option(help="Region of the weight store. Default: us-east-1.")
    ] = None,
    store_credentials_file: Annotated[
        Path | None, typer.Option(help="Shared credentials file for the weight store.")
    ] = None,
    allow_recipe_code: Annotated[
        bool, typer.Option("--allow-recipe-code", help="Import the Python files that come with the recipe.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="torch threads of a step. Default: 1.")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of TrainerService. Default: a free one.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of the pages for people. Default: a free one.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate settings, connection, recipe and plug-ins, then exit.")
    ] = False,
) -> None:
    """Start the trainer of one policy.

    It gets the recipe and the store from the dataflow server, resumes from --work-dir when it holds a
    checkpoint, and ends with status 0 when the last step is published. A second trainer of the same policy
    takes over; the first one stops. With `torchrun --nproc-per-node N -m astraflow_trainer …` N ranks train
    together; they need one --work-dir that all of them see.
    """
    given = {
        "join": join,
        "run_id": run_id,
        "policy": policy,
        "steps": steps,
        "work_dir": work_dir,
        "cache_dir": cache_dir,
        "token_file": token_file,
        "store_endpoint_url": store_endpoint_url,
        "store_region": store_region,
        "store_credentials_file": store_credentials_file,
        "allow_recipe_code": allow_recipe_code or None,
        "threads": threads,
        "grpc_port": grpc_port,
        "http_port": http_port,
    }
    settings, rank = load(TrainerSettings, given), load_rank_settings()
    lifecycle.begin("trainer", settings)
    # torch takes seconds to import: `--help` and wrong settings must not wait for it.
    from astraflow_trainer import server

    sys.exit(server.check(settings) if check else server.run(settings, rank))


if __name__ == "__main__":
    app()
