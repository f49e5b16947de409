"""`astraflow doctor`: run every check of this machine, as a table or as JSON; status 1 when one failed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astraflow_launcher.support.checks import Finding, State, run_checks
from astraflow_launcher.support.identity_checks import check_certificate_file, check_token_file

app = typer.Typer(add_completion=False)

_STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "red"}


@app.command()
def doctor(
    store: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Also probe this weight store, file:///… or s3://bucket/prefix."),
    ] = None,
    certificates: Annotated[
        list[Path] | None,
        typer.Option("--certificate", metavar="FILE", help="Also look at these certificates; repeat it."),
    ] = None,
    tokens: Annotated[
        list[Path] | None,
        typer.Option("--token", metavar="FILE", help="Also look at this token or join string; repeat it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and suggest fixes. Changes nothing.

    Status 1: something failed. How to reach an S3 store comes from ASTRAFLOW_STORE_ENDPOINT_URL,
    ASTRAFLOW_STORE_REGION and ASTRAFLOW_STORE_CREDENTIALS_FILE, as for a trainer.
    """
    findings = run_checks(store_uri=store)
    findings += [each for path in certificates or () for each in check_certificate_file(path)]
    findings += [each for path in tokens or () for each in check_token_file(path)]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console().print(_as_table(findings))
    if any(finding.state is State.FAILED for finding in findings):
        raise typer.Exit(1)


def _as_table(findings: list[Finding]) -> Table:
    table = Table("check", "", "found", "suggested fix", box=None, padding=(0, 2), header_style="dim")
    for finding in findings:
        state = f"[{_STYLES[finding.state]}]{finding.state.value}[/]"
        # Remedies such as 'astraflow[dev]' would lose their brackets as markup.
        table.add_row(finding.check, state, escape(finding.found), escape(finding.remedy))
    return table
