"""`astraflow weights export`: a version as a Hugging Face model folder. docs/weights.md documents the JSON fields."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from astraflow.commands.options import grouped_options
from astraflow.commands.wording import count_text, print_json
from astraflow.errors import InvalidArgumentError
from astraflow_weights.tools.export import export_version
from astraflow_weights.tools.located import PolicyOptions, StoredPolicy

LATEST = "latest"


@grouped_options
def export(
    version: Annotated[
        str, typer.Argument(metavar="VERSION", help="Version to export: a number, or `latest`.")
    ],
    to: Annotated[
        Path,
        typer.Option(
            "--to", metavar="FOLDER", help="New or empty folder; it is there when all is, or not at all."
        ),
    ],
    options: PolicyOptions,
) -> None:
    """Write VERSION as a Hugging Face model folder, which transformers loads: weights, config.json, tokenizer.

    Every part, file and tensor is compared with its digest. Models above 5 GB are split, with an index. Example:
    astraflow weights export latest --to my-model
    """
    with options.stored() as found:
        exported = export_version(found.store, found.log, version=_number(found, version), to=to)
    if options.json_:
        print_json(dataclasses.asdict(exported))
        return
    size_bytes = sum(exported.files.values())
    typer.echo(
        f"version {exported.version} of policy {exported.policy_id!r} of run {exported.run_id!r}, after step "
        f"{exported.step}, is in {exported.folder}: {exported.num_tensors} tensors, {len(exported.files)} files, "
        f"{count_text(size_bytes)} bytes"
    )
    if "config.json" not in exported.files:
        typer.echo("it was published without config.json, which transformers needs to load it", err=True)


def _number(found: StoredPolicy, version: str) -> int:
    if version != LATEST and not version.isdecimal():
        raise InvalidArgumentError(f"VERSION {version!r}: give a number, or `{LATEST}`")
    newest = len(found.log.records) - 1
    return found.check_version(newest if version == LATEST else int(version))
