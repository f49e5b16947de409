"""How to reach a server: its address, whom to trust, and as whom to call.

Invariant: a token is sent only over TLS or to this machine itself. All that files say is asked for anew at each call:
token, address, authorities and client certificate can be replaced while a process runs. Made by whoever dials;
`channels` opens it, `trust` explains why it does not work.
"""

import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeAlias

from astraflow.connecting.watched import WatchedFiles
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
    again: "Callable[[], Connection] | None" = field(default=None, kw_only=True, repr=False, compare=False)
    """What the files that it was read from say now."""

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
    def of(cls, target: str | Path) -> "Connection":
        """What an address (without TLS), a join string, or the file of one says."""
        if isinstance(target, Path):
            return dial("", join_file=target, files=DialFiles())
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

    def current(self) -> "Connection":
        """The same as its files are now, or were when they were usable last; one object until they change."""
        return self.again() if self.again else self

    def current_token(self) -> str:
        """The token to send now; empty without one. Raises UnavailableError while its file cannot be read."""
        token = self.current().token
        if isinstance(token, Path):
            try:
                return token.read_text().strip()
            except OSError as error:
                raise UnavailableError(f"token file {token} cannot be read: {error.strerror}") from error
        return token if isinstance(token, str) else token()


def _named_connection(target: str) -> Connection:
    try:
        return Connection.of(target)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"join: {error.message}") from error


def _join_file_connection(path: Path, content: bytes) -> Connection:
    """What the join string in a file says. Raises InvalidArgumentError naming the file."""
    try:
        given = Connection.joining(parse_join(content.decode(errors="replace")))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"join file {path}: {error.message}") from error
    return replace(given, token=partial(str, given.token)) if given.token else given


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
    if files.token_file is not None:
        _file_content(files.token_file, name="token file")
    named = {
        "join file": join_file,
        "CA file": files.ca_file,
        "client certificate": files.client_cert_file,
        "client key": files.client_key_file,
    }
    paths = {name: path for name, path in named.items() if path is not None}
    names = {path: name for name, path in paths.items()}

    def parse(*contents: bytes) -> Connection:
        content = dict(zip(paths, contents, strict=True))
        described = _described(target, join_file=join_file, files=files, content=content)
        return replace(described, again=lambda: watched.current())

    def read(path: Path) -> bytes:
        return _file_content(path, name=names[path])

    watched = WatchedFiles(*paths.values(), read=read, parse=parse)
    return watched.current()


def _described(
    target: str, *, join_file: Path | None, files: DialFiles, content: Mapping[str, bytes]
) -> Connection:
    given = (
        _named_connection(target)
        if join_file is None
        else _join_file_connection(join_file, content["join file"])
    )
    described = replace(
        given,
        token=files.token_file or given.token,
        ca=b"" if files.public_ca and not files.ca_file else content.get("CA file", given.ca),
        public_ca=files.public_ca or (given.public_ca and not files.ca_file),
        server_name=files.server_name or given.server_name,
        client_cert=content.get("client certificate", b""),
        client_key=content.get("client key", b""),
        insecure=files.insecure,
    )
    _require_usable(described, files)
    return described


def _require_usable(described: Connection, files: DialFiles) -> None:
    """Raise InvalidArgumentError for a file that TLS cannot use, as of a pair of which one half is replaced so far."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if files.ca_file:
            context.load_verify_locations(cadata=described.ca.decode(errors="replace"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"CA file {files.ca_file} holds no certificate in PEM: {error}") from error
    try:
        if files.client_cert_file:
            context.load_cert_chain(files.client_cert_file, files.client_key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"client certificate {files.client_cert_file} and client key {files.client_key_file} are no pair in PEM "
            f"without password: {error}; give the two that were issued together"
        ) from error


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
