"""Tokens: issued with a signing key, and described without one.

Invariant: a description never holds the signature, so it can be shown to anybody. Called by `astraflow token` and
`astraflow join-token`, and by whatever makes the secrets of a first start.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from astraflow.errors import InvalidArgumentError
from astraflow.join import JoinString
from astraflow_kit.identity.tokens import ALGORITHM, ALL, ISSUER, ROLES, own_nodes
from astraflow_launcher.issuing.keys import key_id, read_signing_key
from astraflow_launcher.issuing.secret_files import write_file

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST = timedelta(days=3650)


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a token allows: a role, in these runs, pools and policies; `*` stands for all of them."""

    role: str
    runs: Sequence[str]
    pools: Sequence[str] = (ALL,)
    policies: Sequence[str] = (ALL,)
    nodes: Sequence[str] = ()
    """Ids of nodes; one that ends in `*` stands for all that begin so. None: its subject, and `SUBJECT-*`."""
    subject: str = ""
    """Who it is for, as servers log it; empty takes the role."""
    audience: str = "astraflow"


def issue_token(grant: Grant, *, ttl: timedelta, key: Path, now: datetime | None = None) -> str:
    """Sign a token that is valid from now for `ttl`. Raises InvalidArgumentError."""
    if grant.role not in ROLES:
        raise InvalidArgumentError(f"role {grant.role!r} is none; roles: {', '.join(ROLES)}")
    if not grant.runs:
        raise InvalidArgumentError("name the run the token is for: --run RUN, or --run '*' for all of them")
    subject = grant.subject or grant.role
    signing_key = read_signing_key(key)
    issued = int((now or datetime.now(UTC)).timestamp())
    claims = {
        "iss": ISSUER,
        "aud": grant.audience,
        "sub": subject,
        "role": grant.role,
        "runs": list(grant.runs),
        "pools": list(grant.pools),
        "policies": list(grant.policies),
        "iat": issued,
        "nbf": issued,
        "exp": issued + int(ttl.total_seconds()),
        "jti": secrets.token_hex(8),
    }
    if grant.role == "rollout":
        claims["nodes"] = list(grant.nodes or own_nodes(subject))
    return jwt.encode(
        claims, signing_key, algorithm=ALGORITHM, headers={"kid": key_id(signing_key.public_key())}
    )


def describe_token(token: str) -> dict[str, Any]:
    """What a token says, times as RFC 3339, without its signature; not whether anybody accepts it.

    Raises InvalidArgumentError for what is no token; the message does not repeat it.
    """
    try:
        header, claims = (
            jwt.get_unverified_header(token),
            jwt.decode(token, options={"verify_signature": False}),
        )
        times = {name: _time(claims[name]) for name in ("iat", "nbf", "exp") if name in claims}
    except (jwt.PyJWTError, ValueError, OverflowError, TypeError) as error:
        raise InvalidArgumentError(
            "this is no token: three parts of base64url with dots between them, as `astraflow token create` writes it"
        ) from error
    named = {"kid": header.get("kid"), "alg": header.get("alg")}
    return json.loads(json.dumps({**claims, **times, **named}, default=str))  # type: ignore[no-any-return]


def describe_join(join: JoinString) -> dict[str, Any]:
    """What a join string says beside its token: authorities by subject, end and fingerprint."""
    authorities = (
        ["this machine's own"] if join.public_ca else [_describe_certificate(each) for each in join.ca]
    )
    name = {"server_name": join.server_name} if join.server_name else {}
    return {"address": join.address, "authorities": authorities, **name}


def read_authorities(path: Path) -> tuple[bytes, ...]:
    """The certificates of a PEM file, as a join string holds them. Raises InvalidArgumentError."""
    try:
        return tuple(
            each.public_bytes(Encoding.DER) for each in x509.load_pem_x509_certificates(path.read_bytes())
        )
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path} holds no certificates in PEM that can be read: {error}"
        ) from error


def _describe_certificate(der: bytes) -> str:
    try:
        certificate = x509.load_der_x509_certificate(der)
    except ValueError:
        return "not a certificate"
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex(":")
    subject, until = certificate.subject.rfc4514_string(), certificate.not_valid_after_utc
    return f"{subject}, valid until {until:%Y-%m-%d}, sha256 {fingerprint}"


def issue_times(described: Mapping[str, Any]) -> tuple[datetime, datetime]:
    """From when until when a described token is valid. Raises InvalidArgumentError when it does not say so."""
    try:
        return datetime.fromisoformat(described["nbf"]), datetime.fromisoformat(described["exp"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError("the token does not say from when until when it is valid") from error


def revoke_in_file(path: Path, described: Mapping[str, Any]) -> None:
    """Add a token to a `revoked_tokens_file`, which is made where there is none; once is enough."""
    known = path.read_text() if path.exists() else "# ids of tokens that are refused\n"
    if described["jti"] in known.split():
        return
    about = " ".join(str(described[name]) for name in ("sub", "exp") if name in described)
    line = f"{described['jti']}  # {about}".removesuffix("  # ") + "\n"
    write_file(path, f"{known.rstrip()}\n{line}".encode(), secret=False)


def read_ttl(text: str) -> timedelta:
    """`30m`, `12h`, `30d`: a length of time. Raises InvalidArgumentError."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdigit() or not int(number):
        raise InvalidArgumentError(f"--ttl {text!r} is no length of time; write 30m, 12h or 30d")
    seconds = int(number) * _UNITS[unit]
    if seconds > _LONGEST.total_seconds():
        raise InvalidArgumentError(
            f"--ttl {text} is too long, at most {_LONGEST.days}d; a token can be replaced in place"
        )
    return timedelta(seconds=seconds)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat().replace("+00:00", "Z")
