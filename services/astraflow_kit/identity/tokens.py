"""Bearer tokens: EdDSA JSON web tokens that say who calls, in which role, and about which runs.

Invariant: the algorithm is fixed, the signature is checked before any claim is believed, and every refusal says what
is wrong and what to do. Pure: bytes, keys and the time in, an `Identity` or a typed error out. Used by `verifier`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from jwt.types import Options

from astraflow.errors import UnauthenticatedError
from astraflow.options.v1 import options_pb2

ALGORITHM = "EdDSA"
ISSUER = "astraflow"
LEEWAY_S = 60.0
"""How far the clocks of signer and server may be apart."""
ALL = "*"
OPEN_TO_ALL = "anyone"
ROLES = tuple(
    role
    for role in (name.removeprefix("ROLE_").lower() for name in options_pb2.Role.keys()[1:])
    if role != OPEN_TO_ALL
)
"""Roles that a token may name."""
_WARNED_S, _WARNED_SHARE = 86_400.0, 0.2
_MAX_SHOWN = 64
_MAX_RUNS_CHARS = 1024
_REMEDY = "ask this server's operator for a new one (astraflow token create)"
# Times, audience and issuer are checked here, to be refused with the values that were found.
_SIGNATURE_ONLY: Options = {
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "verify_aud": False,
    "verify_iss": False,
}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A caller: the `subject` of its token, its role or roles, and what it may speak of; `*` in a list means all."""

    subject: str
    roles: frozenset[str]
    runs: frozenset[str] = frozenset({ALL})
    pools: frozenset[str] = frozenset({ALL})
    policies: frozenset[str] = frozenset({ALL})
    nodes: frozenset[str] = frozenset({ALL})
    """Ids of the nodes that it may be; one that ends in `*` stands for all that begin so."""
    token_id: str = ""
    """The token's `jti`, by which it is revoked; empty for a caller without token."""
    expires_s: float = math.inf
    """Seconds since the Unix epoch."""
    warned_from_s: float = math.inf
    """From when operators see that it ends: its last fifth, at most a day."""

    @property
    def is_narrow(self) -> bool:
        """Whether its token is for less than everything."""
        return not all(ALL in claim for claim in (self.runs, self.pools, self.policies))

    def may_see(self, run_id: str) -> bool:
        """Whether its token is for the run."""
        return ALL in self.runs or run_id in self.runs

    def may_be(self, node_id: str) -> bool:
        """Whether its token is for the node."""
        return any(
            node_id.startswith(name[:-1]) if name.endswith(ALL) else node_id == name for name in self.nodes
        )


def own_nodes(subject: str) -> tuple[str, ...]:
    """The nodes that a token is for which names none: the one that is called as its subject. Names that begin so may be
    the subjects of others.
    """
    return (subject,)


def nodes_said_by(token: str) -> tuple[str, ...]:
    """The nodes that a token is for by its own word, as one can ask before the server verifies it; all without one, or
    where the server is to say what is wrong with it.
    """
    try:
        claims = jwt.decode(token, options={"verify_signature": False}) if token else {}
    except (jwt.PyJWTError, ValueError):
        return (ALL,)
    nodes = claims.get("nodes")
    if isinstance(nodes, list):
        return tuple(map(str, nodes))
    return own_nodes(claims["sub"]) if isinstance(claims.get("sub"), str) else (ALL,)


def refusal(reason: str, message: str, *, of: Identity | None = None) -> UnauthenticatedError:
    """The error for a token that is not accepted; `reason` is a slug, which also labels the metric. `of` is what the
    token proves all the same.
    """
    proven = {"subject": of.subject, "runs": ",".join(sorted(of.runs))[:_MAX_RUNS_CHARS]} if of else {}
    return UnauthenticatedError(message, metadata={"reason": reason, **proven})


def verify(token: str, *, keys: Mapping[str, Ed25519PublicKey], audience: str, now_s: float) -> Identity:
    """The identity that `token` proves at `now_s`. Whether it was revoked is the caller's question.

    Raises UnauthenticatedError whose metadata `reason` is `malformed`, `algorithm`, `unknown_key`, `signature`,
    `wrong_audience`, `not_yet_valid` or `expired`.
    """
    claims = _signed_claims(token, keys)
    identity = _identity(claims)
    _require_audience(claims, audience, of=identity)
    _require_time(claims, of=identity, now_s=now_s)
    return identity


def _signed_claims(token: str, keys: Mapping[str, Ed25519PublicKey]) -> Mapping[str, Any]:
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError) as error:
        raise refusal("malformed", f"the token is no JSON web token; {_REMEDY}") from error
    if header.get("alg") != ALGORITHM:
        found = _shown(header.get("alg"))
        raise refusal(
            "algorithm", f"the token's algorithm is {found}, only {ALGORITHM} is accepted; {_REMEDY}"
        )
    name = header.get("kid")
    key = keys.get(name) if isinstance(name, str) else None
    if key is None:
        raise refusal(
            "unknown_key",
            f"the token is signed with key {_shown(name)}, which this server does not know (it knows "
            f"{', '.join(sorted(keys))}): was that key rotated away? {_REMEDY}",
        )
    try:
        claims: Mapping[str, Any] = jwt.decode(token, key, algorithms=[ALGORITHM], options=_SIGNATURE_ONLY)
    except jwt.InvalidSignatureError as error:
        raise refusal(
            "signature", f"key {name!r} did not sign the token: it was changed or forged; {_REMEDY}"
        ) from error
    except (jwt.PyJWTError, ValueError) as error:
        raise refusal("malformed", f"the token cannot be read; {_REMEDY}") from error
    return claims


def _identity(claims: Mapping[str, Any]) -> Identity:
    texts = {name: claims.get(name) for name in ("sub", "jti", "role")}
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise refusal("malformed", f"the token has no claim `{name}`; {_REMEDY}")
    role = str(texts["role"])
    if claims.get("iss") != ISSUER:
        found = _shown(claims.get("iss"))
        raise refusal("malformed", f"the token's issuer is {found}, not {ISSUER!r}; {_REMEDY}")
    if role not in ROLES:
        raise refusal(
            "malformed", f"the token's role is {_shown(role)}, not one of {', '.join(ROLES)}; {_REMEDY}"
        )
    expires_s = _time(claims, "exp")
    return Identity(
        subject=str(texts["sub"])[:_MAX_SHOWN],
        roles=frozenset({role}),
        runs=_names(claims, "runs"),
        pools=_names(claims, "pools"),
        policies=_names(claims, "policies"),
        nodes=_names(claims, "nodes") if "nodes" in claims else frozenset(own_nodes(str(texts["sub"]))),
        token_id=str(texts["jti"]),
        expires_s=expires_s + LEEWAY_S,
        warned_from_s=expires_s - min(_WARNED_S, _WARNED_SHARE * (expires_s - _time(claims, "nbf"))),
    )


def _names(claims: Mapping[str, Any], claim: str) -> frozenset[str]:
    names = claims.get(claim)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise refusal("malformed", f'the token\'s `{claim}` must be a list of names, or ["{ALL}"]; {_REMEDY}')
    return frozenset(names)


def _require_audience(claims: Mapping[str, Any], audience: str, *, of: Identity) -> None:
    named = claims.get("aud")
    audiences = named if isinstance(named, list) else [named]
    if audience not in audiences:
        raise refusal(
            "wrong_audience",
            f"the token is for audience {_shown(named)}, this server is {audience!r} (its setting token_audience): "
            "it belongs to another installation, or was made with another --audience",
            of=of,
        )


def _require_time(claims: Mapping[str, Any], *, of: Identity, now_s: float) -> None:
    who = of.subject
    valid_from_s, expires_s = _time(claims, "nbf"), _time(claims, "exp")
    if now_s < valid_from_s - LEEWAY_S:
        raise refusal(
            "not_yet_valid",
            f"the token of {who!r} is valid from {shown_time(valid_from_s)}, this server's clock says "
            f"{shown_time(now_s)}: a clock is off; set the signer's and this server's clock (NTP), or wait",
            of=of,
        )
    if now_s >= expires_s + LEEWAY_S:
        raise refusal(
            "expired",
            f"the token of {who!r} expired at {shown_time(expires_s)}, this server's clock says "
            f"{shown_time(now_s)}; {_REMEDY}",
            of=of,
        )


def _time(claims: Mapping[str, Any], claim: str) -> float:
    value = claims.get(claim)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refusal("malformed", f"the token has no time in claim `{claim}`; {_REMEDY}")
    return float(value)


def shown_time(seconds: float) -> str:
    """A moment as people and logs read it, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f} s after 1970"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value[:4])) or "none"
    return repr(str(value)[:_MAX_SHOWN]) if value is not None else "none"


def read_revoked(text: str) -> frozenset[str]:
    """Ids of revoked tokens: one `jti` a line, `#` starts a comment."""
    lines: Iterable[str] = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(line for line in lines if line)
