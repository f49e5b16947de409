"""`astraflow weights show`: what one version is made of, what it costs to get there and who serves it.

Invariant: reads only. JSON fields are documented in docs/weights.md.
"""

import dataclasses
from typing import Any

from astraflow.commands.options import grouped_options
from astraflow.commands.wording import console, count_text, heading, print_json, table
from astraflow.dataflow.v1 import admin_service_pb2
from astraflow_kit.clock import SystemClock
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.tools.located import THREADS, PolicyOptions, StoredPolicy, VersionArgument, share_text
from astraflow_weights.versions import inspection
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.inspection import OfferedPath, Route
from astraflow_weights.versions.manifest import Manifest

# What JSON has as the manifest has it.
_MANIFEST_FIELDS = (
    *("run_id", "policy_id", "version", "sequence", "writer_epoch", "step", "rollback_of", "parent_version"),
    *("learning_rate", "created_time_s", "density", "num_changed", "num_elements"),
)


@grouped_options
def show(version: VersionArgument, options: PolicyOptions) -> None:
    """Say what VERSION is made of, what it costs to get there and who serves it. Reads its parts."""
    with options.stored() as found:
        record = found.log.record(found.check_version(version))
        manifest = found.log.manifest(version)
        paths = inspection.offered_paths(found.store, record, threads=THREADS)
        routes = inspection.routes(found.log, target=version)
        keys = PolicyKeys(found.log.run_id, found.log.policy_id)
        pulls = inspection.running_pulls(found.store, keys, record, now_s=SystemClock().wall_time_s())
        held = _held(found, version) | {"pull_leases": [dataclasses.asdict(pull) for pull in pulls]}
    if options.json_:
        print_json(_shown(record, manifest, paths=paths, routes=routes) | held)
    else:
        _print_shown(manifest, paths=paths, routes=routes, held=held)


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
    record: VersionRecord, manifest: Manifest, *, paths: list[OfferedPath], routes: list[Route]
) -> dict[str, Any]:
    return {
        **{name: getattr(manifest, name) for name in _MANIFEST_FIELDS},
        "manifest_sha256": record.manifest_sha256.hex(),
        "model_bytes": manifest.size_bytes,
        "model_root": manifest.model_root.hex(),
        "paths": [_path(path) for path in paths],
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


def _path(path: OfferedPath) -> dict[str, Any]:
    return {
        "base_version": path.base_version,
        "parts": path.parts,
        "size_bytes": path.size_bytes,
        "codecs": {
            share.codec.name.lower(): {
                "tiles": share.tiles,
                "body_bytes": share.body_bytes,
                "num_changed": share.num_changed,
            }
            for share in path.codecs
        },
    }


def _print_shown(
    manifest: Manifest,
    *,
    paths: list[OfferedPath],
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
    screen.print(_paths_table(paths))
    screen.print(heading("what it costs to get there"))
    costs = table("from", "steps", "bytes", right=("steps", "bytes"))
    for route in routes:
        start = "nothing" if route.held is None else f"version {route.held}"
        if route.steps is None or route.size_bytes is None:
            costs.add_row(start, "no path", "–")
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
        ("changed", f"{share_text(manifest.density)}, {changed}"),
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


def _paths_table(paths: list[OfferedPath]) -> Any:  # noqa: ANN401 - a rich table
    shown = table(
        *("path", "parts", "bytes", "codec", "tiles", "body bytes", "changed"),
        right=("parts", "bytes", "tiles", "body bytes", "changed"),
    )
    for path in paths:
        name = "snapshot" if path.base_version is None else f"delta from {path.base_version}"
        cells = (name, str(path.parts), count_text(path.size_bytes))
        for share in path.codecs:
            figures = (share.tiles, share.body_bytes, share.num_changed)
            shown.add_row(*cells, share.codec.name, *(count_text(figure) for figure in figures))
            cells = ("", "", "")
        if not path.codecs:
            shown.add_row(*cells, "–", "–", "–", "–")
    return shown
