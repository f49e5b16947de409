"""The join string: one line that says where a server is, how it proves who it is, and as whom to call it.

    af1.eyJhZGRyZXNzIjoi...        "af1." and, as base64url without padding, the JSON
    {"address": "host:port", "ca": ["<base64 DER>", ...], "public_ca": false, "server_name": "", "token": "<jwt>"}

Invariant: the certificates of the authority travel in it, so no connection is made before the authority is known. It
holds a token: it is a secret, and comes from a file or a variable, never from a command line. Written by
`astraflow join-token`; read by whoever dials, in every language (tests/conformance/join_strings.json).
"""

import base64
import binascii
import json
import re
from dataclasses import dataclass, field

from astraflow.errors import InvalidArgumentError

__all__ = ["JoinString", "format_join", "is_join_string", "parse_join", "require_address"]

_PREFIX = "af1."
_MAX_CHARS = 65_536
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_REMEDY = "; ask the server's operator for a new one (`astraflow join-token`)"


@dataclass(frozen=True, kw_only=True)
class JoinString:
    """What a join string says. Raises InvalidArgumentError unless it names an authority and a usable address."""

    address: str
    ca: tuple[bytes, ...] = ()
    """Certificates, in DER, of the authorities that the server's certificate may come from."""
    public_ca: bool = False
    """The server's certificate comes from an authority that this machine trusts anyway."""
    server_name: str = ""
    """Name that the certificate must carry; empty takes the host of the address."""
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        require_address(self.address)
        if bool(self.ca) == self.public_ca:
            which = "both ca and public_ca" if self.ca else "neither ca nor public_ca"
            raise InvalidArgumentError(
                f"the join string names {which}: exactly one says whom to trust{_REMEDY}"
            )


def is_join_string(text: str) -> bool:
    """Whether this is meant as a join string rather than as an address."""
    return text.strip().startswith(_PREFIX)


def format_join(join: JoinString) -> str:
    """Return the one line. Equal contents give equal lines, in every language."""
    content = {
        "address": join.address,
        "ca": [base64.b64encode(certificate).decode() for certificate in join.ca],
        "public_ca": join.public_ca,
        "server_name": join.server_name,
        "token": join.token,
    }
    written = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    return _PREFIX + base64.urlsafe_b64encode(written).decode().rstrip("=")


def parse_join(text: str) -> JoinString:
    """Read a join string; white space around it is ignored, and so are keys that a newer release may add.

    Raises InvalidArgumentError, whose message never repeats the content.
    """
    text = text.strip()
    if not text.startswith(_PREFIX):
        raise InvalidArgumentError(f"a join string begins with {_PREFIX!r}{_REMEDY}")
    if len(text) > _MAX_CHARS:
        raise InvalidArgumentError(
            f"the join string has {len(text)} characters, at most {_MAX_CHARS}{_REMEDY}"
        )
    try:
        content = json.loads(_decoded(text.removeprefix(_PREFIX), alphabet=b"-_"))
    except (ValueError, RecursionError):
        raise InvalidArgumentError(f"the join string is damaged or was cut short{_REMEDY}") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"the join string holds no JSON object{_REMEDY}")
    return JoinString(
        address=_text(content, "address"),
        ca=_certificates(content.get("ca", [])),
        public_ca=_is_true(content.get("public_ca", False)),
        server_name=_text(content, "server_name"),
        token=_text(content, "token"),
    )


def require_address(address: str) -> None:
    """Raise InvalidArgumentError unless this is HOST:PORT, with IPv6 hosts in brackets."""
    parts = _ADDRESS.fullmatch(address)
    if parts is None or not 1 <= int(parts[2]) <= 65_535:
        raise InvalidArgumentError(
            f"address {address!r} must be HOST:PORT with a port of 1-65535: 127.0.0.1:7070, [::1]:7070"
        )


def _text(content: dict[str, object], key: str) -> str:
    value = content.get(key, "")
    # A token is sent as a header, and a name is looked up: neither can hold anything else.
    if not isinstance(value, str) or not (value.isascii() and all("!" <= char <= "~" for char in value)):
        raise InvalidArgumentError(
            f"{key} of the join string must be printable ASCII without spaces{_REMEDY}"
        )
    return value


def _is_true(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"public_ca of the join string must be true or false{_REMEDY}")
    return value


def _certificates(given: object) -> tuple[bytes, ...]:
    try:
        if isinstance(given, list):
            found = tuple(_decoded(each, alphabet=b"+/") for each in given)
            # Every certificate is a DER sequence of two length bytes at least.
            if all(each[:1] == b"\x30" and len(each) > 4 for each in found):
                return found
    except ValueError:
        pass
    raise InvalidArgumentError(f"ca of the join string must be a list of base64 DER certificates{_REMEDY}")


def _decoded(text: object, *, alphabet: bytes) -> bytes:
    if not isinstance(text, str):
        raise binascii.Error("not text")
    unpadded = text.rstrip("=")
    return base64.b64decode(unpadded + "=" * (-len(unpadded) % 4), altchars=alphabet, validate=True)
