"""`astraflow weights gc`: delete the parts that nobody needs any more.

Invariant: nothing is deleted whose pins could not be asked for, unless that was said. Interrupted at any instant,
the next collector, here or in a trainer, goes on. JSON fields are documented in docs/weights.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from astraflow.commands.options import grouped_options
from astraflow.commands.wording import console, count_text, print_json, span_text, table
from astraflow.errors import InvalidArgumentError
from astraflow_weights.collection.collector import Collector, Stage, Survey
from astraflow_weights.collection.retention import Roots
from astraflow_weights.collection.server_roots import server_roots
from astraflow_weights.settings import CollectionSettings
from astraflow_weights.tools.located import PolicyOptions, StoredPolicy

_POLL_S = 1.0
_WRITERS_S = 60.0
_DEFAULT = CollectionSettings()


@dataclass(kw_only=True)
class _Swept:
    """What the command did."""

    parts: int = 0
    size_bytes: int = 0
    state: str = "done"


@grouped_options
def gc(
    options: PolicyOptions,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="S", min=0, max=86_400, help="Seconds from marking a part to deleting it."
        ),
    ] = _DEFAULT.grace_s,
    keep_snapshots: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Newest snapshots to keep, with everything after the oldest."),
    ] = _DEFAULT.keep_snapshots,
    ignore_pins: Annotated[
        bool,
        typer.Option("--ignore-pins", help="With --store, which asks no server: keep no pinned version."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what is kept and why; delete nothing.")
    ] = False,
) -> None:
    """Delete parts that no retained, pinned or served version needs. Waits for the grace; interrupting is safe."""
    with options.stored() as found:
        collector = Collector(
            found.store,
            run_id=found.log.run_id,
            policy_id=found.log.policy_id,
            roots=_roots(found, ignore_pins=ignore_pins or dry_run),
            settings=CollectionSettings(keep_snapshots=keep_snapshots, grace_s=grace),
            log=found.log,
        )
        survey = collector.look()
        if not options.json_:
            _print_survey(survey)
        swept = _Swept(state="dry run") if dry_run else _collect(collector, grace_s=grace)
    if options.json_:
        print_json(_result(survey, swept))
    else:
        typer.echo(_sentence(survey, swept))


def _roots(found: StoredPolicy, *, ignore_pins: bool) -> Callable[[], Roots]:
    server = found.server
    if server is not None:
        return lambda: server_roots(server.client, run_id=server.run_id, policy_id=server.policy_id)
    if ignore_pins:
        return Roots
    raise InvalidArgumentError(
        "--store asks no server which versions are pinned or served, and nothing is deleted without knowing: leave it "
        "away while the run's server is up, else say --ignore-pins"
    )


def _collect(collector: Collector, *, grace_s: float) -> _Swept:
    """Finish the round that is under way, if there is one, then one round of our own."""
    swept, begun, blocked_s = _Swept(), False, 0.0
    while True:
        step = collector.step()
        if step.stage is Stage.SWEPT:
            swept.parts += step.num_parts
            swept.size_bytes += step.size_bytes
            if begun:
                return swept
        elif step.stage is Stage.BEGUN:
            begun = True
            typer.echo(
                f"{step.num_parts} parts are marked and will be deleted in {span_text(grace_s)}; interrupting is safe",
                err=True,
            )
        elif step.stage is Stage.GRACE:
            time.sleep(min(step.wait_s, _POLL_S))
        elif step.stage is Stage.WRITERS:
            if blocked_s >= _WRITERS_S:
                swept.state = "waits for a writer"
                return swept
            blocked_s += _POLL_S
            time.sleep(_POLL_S)
        else:
            return swept


def _result(survey: Survey, swept: _Swept) -> dict[str, Any]:
    return {
        "state": swept.state,
        "horizon": survey.horizon,
        "kept": [
            {"why": share.why, "paths": share.paths, "parts": share.parts, "size_bytes": share.size_bytes}
            for share in survey.kept
        ],
        "garbage_parts": len(survey.garbage),
        "garbage_bytes": sum(survey.garbage.values()),
        "unnamed_parts": len(survey.unnamed),
        "unnamed_bytes": sum(survey.unnamed.values()),
        "lost": list(survey.lost),
        "unreadable": list(survey.unreadable),
        "swept_parts": swept.parts,
        "swept_bytes": swept.size_bytes,
    }


def _print_survey(survey: Survey) -> None:
    shown = table("what", "paths", "parts", "bytes", right=("paths", "parts", "bytes"))
    for share in survey.kept:
        shown.add_row(
            f"kept: {share.why}", str(share.paths), count_text(share.parts), count_text(share.size_bytes)
        )
    for what, parts in (
        ("named by no path (uploads, leftovers)", survey.unnamed),
        ("not needed", survey.garbage),
    ):
        shown.add_row(what, "–", count_text(len(parts)), count_text(sum(parts.values())))
    console().print(shown)
    for version in survey.lost:
        typer.echo(f"nothing leads to version {version} any more, which should be kept", err=True)
    if survey.unreadable:
        versions = ", ".join(map(str, survey.unreadable))
        typer.echo(
            f"parts that nothing names are kept: the entries of versions {versions} cannot be read", err=True
        )


def _sentence(survey: Survey, swept: _Swept) -> str:
    if swept.state == "dry run":
        return f"nothing was deleted; versions from {survey.horizon} on are kept"
    result = f"{count_text(swept.parts)} parts of {count_text(swept.size_bytes)} bytes were deleted"
    if swept.state != "done":
        result += (
            "; a writer that is at work, or died, blocks the rest: run this again when it has published, "
            "or in an hour"
        )
    return result
