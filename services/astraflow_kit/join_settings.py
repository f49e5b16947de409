"""Settings of a daemon that dials the dataflow server: where it is, whom to trust, and as whom to call.

Invariant: a secret is a file or a variable; on a command line a join string is refused, because every process of the
machine reads those. Nodes and trainers build on it.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from astraflow.connecting.connection import Connection, DialFiles, dial
from astraflow.errors import AstraflowError
from astraflow.join import is_join_string
from astraflow_kit.settings import CommandOption, DaemonSettings


def _no_secret(given: str) -> str | None:
    if not is_join_string(given):
        return None
    return (
        "a join string holds a token, and every process of this machine reads command lines; put it into a file and "
        "give --join-file FILE, or set ASTRAFLOW_JOIN"
    )


class JoinSettings(DaemonSettings):
    """How to reach the dataflow server. Needs `join` or `join_file`; the others replace what a join string says."""

    options_come_first: ClassVar[bool] = True

    join: Annotated[
        str, Field(repr=False), CommandOption("The server", metavar="HOST:PORT", refused=_no_secret)
    ] = ""
    """Address of the dataflow server; as the variable also a join string."""
    join_file: Path | None = None
    """File holding a join string: address, authority and token in one (`astraflow join-token`). Like the other files,
    read again when it changes."""
    token_file: Path | None = None
    """File holding the token to call with; read again for each call."""
    ca_file: Path | None = None
    """PEM certificates of the authorities that the server's certificate may come from. Turns TLS on."""
    public_ca: bool = False
    """Trust the authorities that this machine trusts anyway. Turns TLS on."""
    server_name: str = ""
    """Name that the server's certificate must carry; empty takes the host of the address."""
    client_cert_file: Path | None = None
    """PEM certificate to show to a server that asks for one; needs `client_key_file`."""
    client_key_file: Path | None = None
    """Its PEM private key."""
    join_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Seconds to wait for the dataflow server, and for a run that is not created yet, before giving up with exit code
    75.
    """
    server_gone_timeout_s: Annotated[float, Field(ge=0, le=31_536_000)] = 3600.0
    """Seconds without the dataflow server after which a daemon that has joined ends with exit code 75; its next start
    goes on where it was, and what a node has not pushed stays on disk. 0: never."""

    @model_validator(mode="after")
    def _can_connect(self) -> Self:
        try:
            self.connection  # noqa: B018 - reads what the settings name, once at start
        except AstraflowError as error:
            raise ValueError(error.message) from error
        return self

    @property
    def connection(self) -> Connection:
        """How to reach the dataflow server."""
        files = DialFiles(
            token_file=self.token_file,
            ca_file=self.ca_file,
            public_ca=self.public_ca,
            server_name=self.server_name,
            client_cert_file=self.client_cert_file,
            client_key_file=self.client_key_file,
            insecure=self.insecure,
        )
        return dial(self.join, join_file=self.join_file, files=files)
