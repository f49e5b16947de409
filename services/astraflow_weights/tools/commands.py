"""`astraflow weights`: list, explain, verify, compare, export and pin the versions of a policy, or go back to one.

Invariant: nothing here writes to a store (`rollback_command` and `collection_command` do); what is pinned is the
server's to keep. JSON fields are documented in docs/weights.md.
"""

import dataclasses
from typing import Annotated, Any

import typer

from astraflow.commands.options import grouped_options
from astraflow.commands.wording import console, count_text, print_json, table
from astraflow.dataflow.v1 import version_service_pb2
from astraflow_kit import log
from astraflow_weights.tools.collection_command import gc
from astraflow_weights.tools.export_command import export
from astraflow_weights.tools.located import (
    THREADS,
    PolicyOptions,
    ServerPolicyOptions,
    VersionArgument,
    share_text,
)
from astraflow_weights.tools.rollback_command import rollback
from astraflow_weights.tools.show_command import show
from astraflow_weights.tools.verification import Verification, verify_version
from astraflow_weights.versions import inspection
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.inspection import TensorChange
from astraflow_weights.versions.log import REMEDY

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(show)
app.command()(export)
app.command()(rollback)
app.command()(gc)


@app.callback()
def weights() -> None:
    """List, explain, verify, compare, export and pin weight versions, go back to one, or collect old ones."""
    # What the parts below log goes to stderr, and only when it matters: stdout is the answer.
    log.configure("weights", level="warning")


@app.command("list")
@grouped_options
def list_(options: PolicyOptions) -> None:
    """List the versions in the store, newest first."""
    with options.stored() as found:
        pins = None if found.server is None else found.server.pins()
        possible = inspection.buildable(found.log)
        rows = [
            _list_row(record, pins)
            | {
                "collected": record.version not in possible and not record.damage,
                "unreadable": record.damage or None,
            }
            for record in reversed(found.log.records)
        ]
        unreadable = found.log.unreadable
        where = f"policy {found.log.policy_id!r} of run {found.log.run_id!r} in {found.store.uri}"
    if options.json_:
        print_json(rows)
        return
    if not rows:
        typer.echo(f"{where} has no version")
        return
    shown = table(
        *("version", "step", "back to", "epoch", "density", "delta bytes", "snapshot bytes", "merged from"),
        "pinned",
        right=("version", "step", "back to", "epoch", "density", "delta bytes", "snapshot bytes"),
    )
    for row in rows:
        shown.add_row(
            *(str(row[name]) for name in ("version", "step")),
            "–" if row["rollback_of"] is None else str(row["rollback_of"]),
            str(row["writer_epoch"]),
            share_text(row["density"]),
            *(count_text(row[name]) if row[name] else "–" for name in ("delta_bytes", "snapshot_bytes")),
            ", ".join(str(base) for base in row["merged_from"]) or "–",
            _remark(row),
        )
    console().print(shown)
    for key, problem in unreadable.items():
        typer.echo(f"entry {key} cannot be read: {problem}; {REMEDY}")


@app.command()
@grouped_options
def verify(version: VersionArgument, options: PolicyOptions) -> None:
    """Rebuild VERSION from the store by each of its paths and compare every digest. Holds it in memory.

    Status 1: something is not what the manifest says.
    """
    with options.stored() as found:
        verified = verify_version(
            found.store, found.log, version=found.check_version(version), threads=THREADS
        )
    if options.json_:
        print_json(_verified(verified))
    else:
        _print_verified(verified)
    if verified.faults:
        raise typer.Exit(1)


@app.command()
@grouped_options
def diff(
    first: Annotated[int, typer.Argument(metavar="A", min=0, help="One version.")],
    second: Annotated[int, typer.Argument(metavar="B", min=0, help="The other.")],
    options: PolicyOptions,
) -> None:
    """Say which share of each tensor differs between versions A and B. Holds both in memory."""
    with options.stored() as found:
        versions = (found.check_version(first), found.check_version(second))
        changes = inspection.changes_between(
            found.store, found.log, first=versions[0], second=versions[1], threads=THREADS
        )
    if options.json_:
        print_json({"first": first, "second": second, **_totals(changes), "tensors": _changed(changes)})
    else:
        _print_changes(changes)


@app.command()
@grouped_options
def pin(
    version: VersionArgument,
    options: ServerPolicyOptions,
    reason: Annotated[str, typer.Option(help="Why, for people; at most 256 characters.")] = "",
) -> None:
    """Keep VERSION until it is unpinned. Pinning again replaces the reason."""
    with options.of_server() as server:
        request = version_service_pb2.PinVersionRequest(
            run_id=server.run_id, policy_id=server.policy_id, version=version, reason=reason
        )
        answer = server.client.call(server.client.versions.PinVersion, request)
    options.show(answer, lambda _: f"version {version} of policy {server.policy_id!r} is pinned")


@app.command()
@grouped_options
def unpin(version: VersionArgument, options: ServerPolicyOptions) -> None:
    """Remove the pin of VERSION; it is success when there is none."""
    with options.of_server() as server:
        request = version_service_pb2.UnpinVersionRequest(
            run_id=server.run_id, policy_id=server.policy_id, version=version
        )
        answer = server.client.call(server.client.versions.UnpinVersion, request)
    outcome = "is no longer pinned" if answer.was_pinned else "was not pinned"
    options.show(answer, lambda _: f"version {version} of policy {server.policy_id!r} {outcome}")


# ---------------------------------------------------------------- for programs


def _list_row(record: VersionRecord, pins: dict[int, str] | None) -> dict[str, Any]:
    return {
        "version": record.version,
        "step": record.step,
        "rollback_of": record.rollback_of,
        "writer_epoch": record.writer_epoch,
        "density": record.density,
        "num_changed": record.num_changed,
        "num_elements": record.num_elements,
        "delta_bytes": record.delta_bytes,
        "snapshot_bytes": sum(part.size_bytes for part in record.offered_snapshot or ()),
        "merged_from": [path.base_version for path in record.added if path.base_version is not None],
        "model_root": record.model_root.hex(),
        "pinned": None if pins is None else record.version in pins,
        "pin_reason": None if pins is None else pins.get(record.version),
    }


def _verified(verified: Verification) -> dict[str, Any]:
    faults = [
        dataclasses.asdict(fault) | {"part": fault.part or None, "tensor": fault.tensor or None}
        for fault in verified.faults
    ]
    return {
        "version": verified.version,
        "ok": not faults,
        "paths": verified.paths,
        "objects": verified.objects,
        "tensors": verified.tensors,
        "model_root": verified.model_root.hex(),
        "faults": faults,
    }


def _totals(changes: list[TensorChange]) -> dict[str, Any]:
    num_changed = sum(change.num_changed for change in changes)
    num_elements = sum(change.spec.num_elements for change in changes)
    share = num_changed / num_elements if num_elements else 0.0
    return {"num_changed": num_changed, "num_elements": num_elements, "share": share}


def _changed(changes: list[TensorChange]) -> list[dict[str, Any]]:
    return [
        {
            "name": change.spec.name,
            "num_changed": change.num_changed,
            "num_elements": change.spec.num_elements,
            "share": change.share,
        }
        for change in changes
    ]


# ---------------------------------------------------------------- for people


def _remark(row: dict[str, Any]) -> str:
    if row["unreadable"]:
        return "unreadable"
    if row["collected"]:
        return "collected"
    return (row["pin_reason"] or "yes") if row["pinned"] else ""


def _print_verified(verified: Verification) -> None:
    read = f"{count_text(verified.objects)} objects, {verified.tensors} tensors, rebuilt by {verified.paths} paths"
    if not verified.faults:
        typer.echo(f"version {verified.version} is whole: {read}; root {verified.model_root.hex()}")
        return
    typer.echo(f"version {verified.version} is damaged:")
    shown = table("version", "tensor", "part", "problem", right=("version",))
    for fault in verified.faults:
        shown.add_row(str(fault.version), fault.tensor or "–", fault.part or "–", fault.problem)
    console().print(shown)


def _print_changes(changes: list[TensorChange]) -> None:
    changed = sorted((change for change in changes if change.num_changed), key=lambda change: -change.share)
    if changed:
        shown = table("tensor", "changed", "elements", "share", right=("changed", "elements", "share"))
        for change in changed:
            counts = (change.num_changed, change.spec.num_elements)
            shown.add_row(
                change.spec.name, *(count_text(count) for count in counts), share_text(change.share)
            )
        console().print(shown)
    totals = _totals(changes)
    typer.echo(
        f"{share_text(totals['share'])} of all elements differ; {len(changes) - len(changed)} of {len(changes)} "
        "tensors are equal"
    )
