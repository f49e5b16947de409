"""`astraflow join-token`: one line with which a node of another machine joins."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.commands.options import grouped_options
from astraflow.join import JoinString, format_join
from astraflow_launcher.commands.token import GrantOptions, OutOption, hand_out
from astraflow_launcher.issuing.tokens import read_authorities

app = typer.Typer(add_completion=False)


@app.command("join-token")
@grouped_options
def join_token(
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where callers reach the dataflow server.")
    ],
    options: GrantOptions,
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Authority of the server's certificate (`astraflow ca`)."),
    ] = None,
    public_ca: Annotated[
        bool, typer.Option("--public-ca", help="The certificate comes from a public authority.")
    ] = False,
    server_name: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Name in the certificate, where it is not the host of the address."
        ),
    ] = "",
    out: OutOption = None,
) -> None:
    """Issue a join string: address, authority and token in one line. It is a secret until its token ends.

    A node takes it with `astraflow raas --join-file FILE`, or from the variable ASTRAFLOW_JOIN.
    """
    join = JoinString(
        address=address,
        ca=read_authorities(ca) if ca else (),
        public_ca=public_ca,
        server_name=server_name,
        token=options.issue(),
    )
    hand_out(format_join(join), out=out)
