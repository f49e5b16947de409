"""How to reach a server: its address, whom to trust, and as whom to call.

Invariant: a token is sent only over TLS or to this machine itself, and is asked for anew at each call, so it can be
replaced while a process runs. Made by whoever dials; `client` opens it, `trust` explains why it does not work.
"""

import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeAlias

from astraflow.errors import InvalidArgumentError, UnavailableError
from astraflow.join import JoinString, is_join_string, parse_join, require_address

Token: TypeAlias = "str | Path | Callable[[], str]"
"""A value, a file, or a function, which are read and called for each call to the server."""


@dataclass(frozen=True)
class Connection:
    """Where a server is, how both sides prove who they are. TLS unless neither `ca` nor `public_ca` is given.

    Raises InvalidArgumentError for parts that do not fit. Certificates and keys are PEM.
    """

    address: str
    """`HOST:PORT`."""
    token: Token = field(default="", kw_only=True, repr=False)
    ca: bytes = field(default=b"", kw_only=True, repr=False)
    """Authorities that the server's certificate may come from."""
    public_ca: bool = field(default=False, kw_only=True)
    """The server's certificate comes from an authority that this machine trusts anyway."""
    server_name: str = field(default="", kw_only=True)
    """Name that the certificate must carry; empty takes the host of the address."""
    client_cert: bytes = field(default=b"", kw_only=True, repr=False)
    """What this side shows to a server that asks for a certificate, with `client_key`."""
    client_key: bytes = field(default=b"", kw_only=True, repr=False)
    insecure: bool = field(default=False, kw_only=True)
    """Send the token without TLS, to whoever listens on the way. For closed test networks only."""

    def __post_init__(self) -> None:
        require_address(self.address)
        if self.ca and self.public_ca:
            raise InvalidArgumentError("ca and public_ca exclude each other: say whom to trust")
        if bool(self.client_cert) != bool(self.client_key):
            raise InvalidArgumentError("a client certificate and its key go together; give both or neither")
        if not self.is_secure and (self.client_cert or self.server_name):
            raise InvalidArgumentError(
                "a server name and a client certificate are for TLS; say whom to trust: a CA file, or public_ca"
            )
        if self.token and not (self.is_secure or self.insecure or is_loopback(self.host)):
            raise InvalidArgumentError(
                f"the token for {self.address} would travel in the clear; say whom to trust (a join string, a CA "
                "file, or public_ca), or accept the risk with insecure"
            )

    @classmethod
    def of(cls, target: str) -> Self:
        """What an address (without TLS), or a join string, says."""
        return cls.joining(parse_join(target)) if is_join_string(target) else cls(target)

    @classmethod
    def joining(cls, join: JoinString) -> Self:
        """What a join string says."""
        return cls(
            join.address,
            token=join.token,
            ca="".join(ssl.DER_cert_to_PEM_cert(each) for each in join.ca).encode(),
            public_ca=join.public_ca,
            server_name=join.server_name,
        )

    @property
    def is_secure(self) -> bool:
        """Whether it uses TLS."""
        return bool(self.ca) or self.public_ca

    @property
    def host(self) -> str:
        """Host of the address, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def token_may_change(self) -> bool:
        """Whether a token that is refused now may be replaced by another one."""
        return not isinstance(self.token, str)

    def current_token(self) -> str:
        """The token to send now; empty without one. Raises UnavailableError while its file cannot be read."""
        if isinstance(self.token, Path):
            try:
                return self.token.read_text().strip()
            except OSError as error:
                raise UnavailableError(f"token file {self.token} cannot be read: {error.strerror}") from error
        return self.token if isinstance(self.token, str) else self.token()


def _named_connection(target: str) -> Connection:
    try:
        return Connection.of(target)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"join: {error.message}") from error


def _join_file_connection(path: Path) -> Connection:
    """What the join string in a file says; its token is read from there again for each call.

    Raises InvalidArgumentError naming the file.
    """

    def token() -> str:
        try:
            return parse_join(path.read_text()).token
        except (OSError, InvalidArgumentError) as error:  # while it is replaced
            raise UnavailableError(f"join file {path} cannot be read: {error}") from error

    written = _file_content(path, name="join file").decode(errors="replace")
    try:
        first = Connection.joining(parse_join(written))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"join file {path}: {error.message}") from error
    return replace(first, token=token) if first.token else first


@dataclass(frozen=True, kw_only=True)
class DialFiles:
    """What a daemon or a command is given beside an address or a join string, whose parts it replaces."""

    token_file: Path | None = None
    ca_file: Path | None = None
    public_ca: bool = False
    server_name: str = ""
    client_cert_file: Path | None = None
    client_key_file: Path | None = None
    insecure: bool = False


def dial(target: str, *, join_file: Path | None, files: DialFiles) -> Connection:
    """The connection that settings describe: an address or a join string, or the file of one.

    Raises InvalidArgumentError naming what is missing, cannot be read or does not fit.
    """
    if bool(target) == (join_file is not None):
        which = "both" if target else "neither"
        raise InvalidArgumentError(
            f"{which} of join and join_file are given; give --join HOST:PORT, --join-file FILE with a join string, or "
            "set ASTRAFLOW_JOIN"
        )
    given = _named_connection(target) if join_file is None else _join_file_connection(join_file)
    token = given.token
    if files.token_file is not None:
        _file_content(files.token_file, name="token file")
        token = files.token_file
    ca = _file_content(files.ca_file, name="CA file") if files.ca_file else given.ca
    return replace(
        given,
        token=token,
        ca=b"" if files.public_ca and not files.ca_file else ca,
        public_ca=files.public_ca or (given.public_ca and not files.ca_file),
        server_name=files.server_name or given.server_name,
        client_cert=_content(files.client_cert_file, name="client certificate"),
        client_key=_content(files.client_key_file, name="client key"),
        insecure=files.insecure,
    )


def _file_content(path: Path, *, name: str) -> bytes:
    """Content of a file that a connection needs. Raises InvalidArgumentError for one that is missing or empty."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"{name} {path} cannot be read: {error.strerror}; mount it or fix its mode"
        ) from error
    if not content.strip():
        raise InvalidArgumentError(f"{name} {path} is empty")
    return content


def _content(path: Path | None, *, name: str) -> bytes:
    return b"" if path is None else _file_content(path, name=name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
