"""`astraflow ca`: a certificate authority for development and small installations."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.commands.wording import print_json
from astraflow_launcher.issuing.authority import Issued, create_authority, issue_certificate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="A certificate authority of your own, for development and small installations.",
)

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]


@app.command()
def create(
    folder: FolderArgument,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="How long it is valid.")] = 3650,
    as_json: JsonOption = False,
) -> None:
    """Make an authority: DIR/ca.pem, which everybody may have, and DIR/ca.key, which must stay here."""
    _show(create_authority(folder, days=days), as_json=as_json)


@app.command()
def issue(
    folder: FolderArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the two files, and of who it is for.")],
    dns: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name that callers use; repeat it.")
    ] = None,
    ips: Annotated[
        list[str] | None, typer.Option("--ip", metavar="ADDRESS", help="Address that callers use; repeat it.")
    ] = None,
    client: Annotated[
        bool, typer.Option("--client", help="For a client: what servers with tls_client_ca_file ask for.")
    ] = False,
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="How long it is valid, until its authority ends at most.")
    ] = 90,
    as_json: JsonOption = False,
) -> None:
    """Issue DIR/NAME.pem and DIR/NAME.key, for a server (tls_cert_file, tls_key_file) or a client."""
    issued = issue_certificate(folder, name, dns=dns or (), ips=ips or (), client=client, days=days)
    _show(issued, as_json=as_json)


def _show(issued: Issued, *, as_json: bool) -> None:
    until = issued.not_after.strftime("%Y-%m-%d %H:%M UTC")
    if as_json:
        files = {"certificate": str(issued.certificate), "key": str(issued.key)}
        print_json({**files, "names": list(issued.names), "not_after": issued.not_after.isoformat()})
        return
    names = f" for {', '.join(issued.names)}" if issued.names else ""
    why = ", when the authority ends" if issued.authority_ends else ""
    typer.echo(f"{issued.certificate}  certificate{names}, valid until {until}{why}")
    typer.echo(f"{issued.key}  its private key: only for whoever shows the certificate")
