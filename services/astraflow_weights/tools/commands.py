"""`astraflow weights`: list, explain, verify, compare and pin the versions of a policy, or go back to one.

Invariant: nothing here writes to a store (`rollback_command` and `collection_command` do); what is pinned is the
server's to keep. JSON fields are documented in docs/weights.md.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from astraflow.commands.server import (
    DataDirOption,
    JoinOption,
    RunIdOption,
    TokenFileOption,
)
from astraflow.commands.wording import as_json, console, count_text, heading, print_json, table
from astraflow.dataflow.v1 import admin_service_pb2, version_service_pb2
from astraflow_kit import log
from astraflow_kit.clock import SystemClock
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.tools.collection_command import gc
from astraflow_weights.tools.located import (
    JsonOption,
    PolicyOption,
    StoredPolicy,
    StoreOption,
    policy_of_server,
    stored_policy,
)
from astraflow_weights.tools.rollback_command import rollback
from astraflow_weights.tools.verification import Fault, Verification, verify_version
from astraflow_weights.versions import inspection
from astraflow_weights.versions.inspection import OfferedWay, Route, TensorChange
from astraflow_weights.versions.log import VersionRecord
from astraflow_weights.versions.manifest import Manifest

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(rollback)
app.command()(gc)


@app.callback()
def weights() -> None:
    """List, explain, verify, compare and pin weight versions, go back to one, or collect old ones."""
    # What the parts below log goes to stderr, and only when it matters: stdout is the answer.
    log.configure("weights", level="warning")


_THREADS = 8

VersionArgument = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Version to look at.")]


@app.command("list")
def list_(
    store: StoreOption = None,
    run_id: RunIdOption = "",
    policy: PolicyOption = "",
    join: JoinOption = None,
    data_dir: DataDirOption = None,
    token_file: TokenFileOption = None,
    json_: JsonOption = False,
) -> None:
    """List the versions in the store, newest first."""
    with stored_policy(
        store=store, run_id=run_id, policy_id=policy, join=join, data_dir=data_dir, token_file=token_file
    ) as found:
        pins = None if found.server is None else found.server.pins()
        possible = inspection.buildable(found.log)
        rows = [
            _list_row(record, pins) | {"collected": record.version not in possible}
            for record in reversed(found.log.records)
        ]
        where = f"policy {found.log.policy_id!r} of run {found.log.run_id!r} in {found.store.uri}"
    if json_:
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
            _share_text(row["density"]),
            *(count_text(row[name]) if row[name] else "–" for name in ("delta_bytes", "snapshot_bytes")),
            ", ".join(str(base) for base in row["merged_from"]) or "–",
            "collected" if row["collected"] else (row["pin_reason"] or "yes") if row["pinned"] else "",
        )
    console().print(shown)


@app.command()
def show(
    version: VersionArgument,
    store: StoreOption = None,
    run_id: RunIdOption = "",
    policy: PolicyOption = "",
    join: JoinOption = None,
    data_dir: DataDirOption = None,
    token_file: TokenFileOption = None,
    json_: JsonOption = False,
) -> None:
    """Say what VERSION is made of, what it costs to get there and who serves it. Reads its parts."""
    with stored_policy(
        store=store, run_id=run_id, policy_id=policy, join=join, data_dir=data_dir, token_file=token_file
    ) as found:
        record = found.log.record(found.check_version(version))
        manifest = found.log.manifest(version)
        ways = inspection.offered_ways(found.store, record, threads=_THREADS)
        routes = inspection.routes(found.log, target=version)
        keys = PolicyKeys(found.log.run_id, found.log.policy_id)
        pulls = inspection.running_pulls(found.store, keys, record, now_s=SystemClock().wall_time_s())
        held = _held(found, version) | {"pull_leases": [dataclasses.asdict(pull) for pull in pulls]}
    if json_:
        print_json(_shown(record, manifest, ways=ways, routes=routes) | held)
    else:
        _print_shown(manifest, ways=ways, routes=routes, held=held)


@app.command()
def verify(
    version: VersionArgument,
    store: StoreOption = None,
    run_id: RunIdOption = "",
    policy: PolicyOption = "",
    join: JoinOption = None,
    data_dir: DataDirOption = None,
    token_file: TokenFileOption = None,
    json_: JsonOption = False,
) -> None:
    """Rebuild VERSION from the store by each of its ways and compare every digest. Holds it in memory.

    Status 1: something is not what the manifest says.
    """
    with stored_policy(
        store=store, run_id=run_id, policy_id=policy, join=join, data_dir=data_dir, token_file=token_file
    ) as found:
        verified = verify_version(
            found.store, found.log, version=found.check_version(version), threads=_THREADS
        )
    if json_:
        print_json(_verified(verified))
    else:
        _print_verified(verified)
    if verified.faults:
        raise typer.Exit(1)


@app.command()
def diff(
    first: Annotated[int, typer.Argument(metavar="A", min=0, help="One version.")],
    second: Annotated[int, typer.Argument(metavar="B", min=0, help="The other.")],
    store: StoreOption = None,
    run_id: RunIdOption = "",
    policy: PolicyOption = "",
    join: JoinOption = None,
    data_dir: DataDirOption = None,
    token_file: TokenFileOption = None,
    json_: JsonOption = False,
) -> None:
    """Say which share of each tensor differs between versions A and B. Holds both in memory."""
    with stored_policy(
        store=store, run_id=run_id, policy_id=policy, join=join, data_dir=data_dir, token_file=token_file
    ) as found:
        versions = (found.check_version(first), found.check_version(second))
        changes = inspection.changes_between(
            found.store, found.log, first=versions[0], second=versions[1], threads=_THREADS
        )
    if json_:
        print_json({"first": first, "second": second, **_totals(changes), "tensors": _changed(changes)})
    else:
        _print_changes(changes)


@app.command()
def pin(
    version: VersionArgument,
    reason: Annotated[str, typer.Option(help="Why, for people; at most 256 characters.")] = "",
    run_id: RunIdOption = "",
    policy: PolicyOption = "",
    join: JoinOption = None,
    data_dir: DataDirOption = None,
    token_file: TokenFileOption = None,
    json_: JsonOption = False,
) -> None:
    """Keep VERSION until it is unpinned. Pinning again replaces the reason."""
    with policy_of_server(
        run_id=run_id, policy_id=policy, join=join, data_dir=data_dir, token_file=token_file
    ) as server:
        request = version_service_pb2.PinVersionRequest(
            run_id=server.run_id, policy_id=server.policy_id, version=version, reason=reason
        )
        answer = server.client.call(server.client.versions.PinVersion, request)
    if json_:
        print_json(as_json(answer))
    else:
        typer.echo(f"version {version} of policy {server.policy_id!r} is pinned")


@app.command()
def unpin(
    version: VersionArgument,
    run_id: RunIdOption = "",
    policy: PolicyOption = "",
    join: JoinOption = None,
    data_dir: DataDirOption = None,
    token_file: TokenFileOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove the pin of VERSION; it is success when there is none."""
    with policy_of_server(
        run_id=run_id, policy_id=policy, join=join, data_dir=data_dir, token_file=token_file
    ) as server:
        request = version_service_pb2.UnpinVersionRequest(
            run_id=server.run_id, policy_id=server.policy_id, version=version
        )
        answer = server.client.call(server.client.versions.UnpinVersion, request)
    if json_:
        print_json(as_json(answer))
        return
    told = "is no longer pinned" if answer.was_pinned else "was not pinned"
    typer.echo(f"version {version} of policy {server.policy_id!r} {told}")


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
        "merged_from": [way.base_version for way in record.added if way.base_version is not None],
        "model_root": record.model_root.hex(),
        "pinned": None if pins is None else record.version in pins,
        "pin_reason": None if pins is None else pins.get(record.version),
    }


def _held(found: StoredPolicy, version: int) -> dict[str, Any]:
    if found.server is None:
        return dict.fromkeys(("pinned", "pin_reason", "announced", "served_by", "nodes"))
    pins, policy_id = found.server.pins(), found.server.policy_id
    nodes = [_node(node, policy_id) for node in found.server.nodes()]
    return {
        "pinned": version in pins,
        "pin_reason": pins.get(version),
        "announced": any(announced.version == version for announced in found.server.announced()),
        "served_by": [node["node_id"] for node in nodes if node["serving_version"] == version],
        "nodes": nodes,
    }


def _node(node: admin_service_pb2.NodeStatus, policy_id: str) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "region": node.region,
        "connected": node.connected,
        "serving_version": dict(node.serving_versions).get(policy_id),
        "waiting_for": node.waiting_for,
    }


def _shown(
    record: VersionRecord, manifest: Manifest, *, ways: list[OfferedWay], routes: list[Route]
) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "policy_id": manifest.policy_id,
        "version": manifest.version,
        "sequence": manifest.sequence,
        "manifest_sha256": record.manifest_sha256.hex(),
        "writer_epoch": manifest.writer_epoch,
        "step": manifest.step,
        "rollback_of": manifest.rollback_of,
        "parent_version": manifest.parent_version,
        "learning_rate": manifest.learning_rate,
        "created_time_s": manifest.created_time_s,
        "density": manifest.density,
        "num_changed": manifest.num_changed,
        "num_elements": manifest.num_elements,
        "model_bytes": manifest.size_bytes,
        "model_root": manifest.model_root.hex(),
        "ways": [_way(way) for way in ways],
        "routes": [dataclasses.asdict(route) for route in routes],
        "chain_length": routes[0].steps,
        "tensors": [
            {
                "name": tensor.spec.name,
                "dtype": tensor.spec.dtype,
                "shape": list(tensor.spec.shape),
                "digest": tensor.digest.hex(),
            }
            for tensor in manifest.tensors
        ],
        "assets": [
            {
                "file_name": asset.file_name,
                "size_bytes": asset.blob.size_bytes,
                "sha256": asset.blob.sha256.hex(),
            }
            for asset in manifest.assets
        ],
    }


def _way(way: OfferedWay) -> dict[str, Any]:
    return {
        "base_version": way.base_version,
        "parts": way.parts,
        "size_bytes": way.size_bytes,
        "codecs": {
            share.codec.name.lower(): {
                "tiles": share.tiles,
                "body_bytes": share.body_bytes,
                "num_changed": share.num_changed,
            }
            for share in way.codecs
        },
    }


def _verified(verified: Verification) -> dict[str, Any]:
    return {
        "version": verified.version,
        "ok": not verified.faults,
        "ways": verified.ways,
        "objects": verified.objects,
        "tensors": verified.tensors,
        "model_root": verified.model_root.hex(),
        "faults": [_fault(fault) for fault in verified.faults],
    }


def _fault(fault: Fault) -> dict[str, Any]:
    return {
        "version": fault.version,
        "part": fault.part or None,
        "tensor": fault.tensor or None,
        "problem": fault.problem,
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


def _print_shown(
    manifest: Manifest,
    *,
    ways: list[OfferedWay],
    routes: list[Route],
    held: dict[str, Any],
) -> None:
    screen = console()
    facts = table("", "")
    facts.show_header = False
    for name, value in _facts(manifest, held):
        facts.add_row(name, value)
    screen.print(facts)
    screen.print(heading("what it offers"))
    screen.print(_ways_table(ways))
    screen.print(heading("what it costs to get there"))
    costs = table("from", "steps", "bytes", right=("steps", "bytes"))
    for route in routes:
        start = "nothing" if route.held is None else f"version {route.held}"
        if route.steps is None or route.size_bytes is None:
            costs.add_row(start, "no way", "–")
        else:
            costs.add_row(start, str(route.steps), count_text(route.size_bytes))
    screen.print(costs)
    screen.print(heading("who holds what"))
    screen.print(_holders_table(held))


def _holders_table(held: dict[str, Any]) -> Any:  # noqa: ANN401 - a rich table
    """Nodes with what they serve, and pulls that fetch parts of the version now."""
    shown = table("who", "state", "serves", right=("serves",))
    for node in held["nodes"] or ():
        serving = node["serving_version"]
        state = node["waiting_for"] or "works" if node["connected"] else "away"
        shown.add_row(node["node_id"], state, "–" if serving is None else str(serving))
    for pull in held["pull_leases"]:
        parts = f"fetches {pull['parts']} parts of it, of {pull['all_parts']} in all"
        shown.add_row(f"pull {pull['holder'][:8]}", parts, "–")
    if held["nodes"] is None:
        shown.add_row("nodes", "ask their server: without --store", "–")
    return shown


def _facts(manifest: Manifest, held: dict[str, Any]) -> list[tuple[str, str]]:
    changed = f"{count_text(manifest.num_changed)} of {count_text(manifest.num_elements)} elements"
    facts = [
        ("version", f"{manifest.version} of {manifest.run_id}/{manifest.policy_id}"),
        ("step, epoch", f"{manifest.step}, {manifest.writer_epoch}"),
        ("back to", "–" if manifest.rollback_of is None else f"version {manifest.rollback_of}"),
        ("changed", f"{_share_text(manifest.density)}, {changed}"),
        ("model", f"{count_text(manifest.size_bytes)} bytes in {len(manifest.tensors)} tensors"),
        ("root", manifest.model_root.hex()),
        ("assets", ", ".join(asset.file_name for asset in manifest.assets) or "–"),
    ]
    if held["served_by"] is not None:
        facts += [
            ("announced", "yes" if held["announced"] else "no: no node may activate it"),
            ("pinned", (held["pin_reason"] or "yes") if held["pinned"] else "no"),
            ("served by", ", ".join(held["served_by"]) or "no node"),
        ]
    return facts


def _ways_table(ways: list[OfferedWay]) -> Any:  # noqa: ANN401 - a rich table
    shown = table(
        *("way", "parts", "bytes", "codec", "tiles", "body bytes", "changed"),
        right=("parts", "bytes", "tiles", "body bytes", "changed"),
    )
    for way in ways:
        name = "snapshot" if way.base_version is None else f"delta from {way.base_version}"
        cells = (name, str(way.parts), count_text(way.size_bytes))
        for share in way.codecs:
            figures = (share.tiles, share.body_bytes, share.num_changed)
            shown.add_row(*cells, share.codec.name, *(count_text(figure) for figure in figures))
            cells = ("", "", "")
        if not way.codecs:
            shown.add_row(*cells, "–", "–", "–", "–")
    return shown


def _print_verified(verified: Verification) -> None:
    read = (
        f"{count_text(verified.objects)} objects, {verified.tensors} tensors, rebuilt by {verified.ways} ways"
    )
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
                change.spec.name, *(count_text(count) for count in counts), _share_text(change.share)
            )
        console().print(shown)
    totals = _totals(changes)
    typer.echo(
        f"{_share_text(totals['share'])} of all elements differ; {len(changes) - len(changed)} of {len(changes)} "
        "tensors are equal"
    )


def _share_text(share: float) -> str:
    return f"{100 * share:.3f} %"
