"""Who calls, and what they may call.

Invariant: a call passes only with a role that the contract of its rpc names. Called by `serve`; servicers read
the caller through `caller()`.
"""

import hashlib
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import PermissionError_, UnauthenticatedError
from astraflow.options.v1 import options_pb2
from astraflow_kit.nearest import did_you_mean
from astraflow_kit.settings import SettingsError

_OPEN_TO_ALL = "anyone"
ROLES = tuple(
    role
    for role in (name.removeprefix("ROLE_").lower() for name in options_pb2.Role.keys()[1:])
    if role != _OPEN_TO_ALL
)
"""Roles that a token may name."""
_SCHEME = "bearer "


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A caller: the `subject` of its token and the roles it has."""

    subject: str
    roles: frozenset[str]


ANYONE = Identity(subject="anonymous", roles=frozenset(ROLES))
_caller: ContextVar[Identity] = ContextVar("astraflow_caller", default=ANYONE)


def caller() -> Identity:
    """The identity behind the rpc being served."""
    return _caller.get()


class Gate:
    """Decides whether a call may proceed. Without a tokens file every caller has every role."""

    def __init__(self, roles_by_rpc: Mapping[str, frozenset[str]], *, tokens_file: Path | None) -> None:
        self._roles_by_rpc = roles_by_rpc
        self._identities = read_tokens(tokens_file) if tokens_file else None

    def admit(self, rpc: str, authorization: str | None) -> Identity:
        """Return the caller of `rpc` (`/package.Service/Method`) and remember it for `caller`.

        Raises UnauthenticatedError for a missing or unknown token, PermissionError_ for a role not allowed.
        """
        allowed = self._roles_by_rpc.get(rpc)
        if (
            allowed is None or _OPEN_TO_ALL in allowed
        ):  # they tell nothing about runs, as health and reflection
            return ANYONE
        identity = self._identify(authorization)
        if not identity.roles & allowed:
            raise PermissionError_(
                f"{identity.subject!r} has roles {sorted(identity.roles)}; {rpc} is for {sorted(allowed)}"
            )
        _caller.set(identity)
        return identity

    def _identify(self, authorization: str | None) -> Identity:
        if self._identities is None:
            if authorization is None:
                return ANYONE
            raise UnauthenticatedError(
                "a token was sent but this server knows none; start it with tokens_file, or send no token"
            )
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise UnauthenticatedError("this server needs `authorization: Bearer TOKEN` metadata")
        identity = self._identities.get(hashlib.sha256(authorization[len(_SCHEME) :].encode()).hexdigest())
        if identity is None:
            raise UnauthenticatedError("the token is unknown to this server; ask its operator for one")
        return identity


def read_tokens(path: Path) -> dict[str, Identity]:
    """Identities by sha256 of their token, from lines `subject role[,role] sha256:HEX`; `#` starts a comment.

    Raises SettingsError naming the line.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(_token(line, where=f"{path} line {number}") for number, line in enumerate(lines, 1) if line)


def _token(line: str, *, where: str) -> tuple[str, Identity]:
    match = re.fullmatch(r"(\S+)\s+(\S+)\s+sha256:([0-9a-f]{64})", line)
    if match is None:
        raise SettingsError(f"{where} is not `subject role[,role] sha256:HEX` (64 lower-case hex digits)")
    roles = match[2].split(",")
    for role in roles:
        if role not in ROLES:
            raise SettingsError(f"{where}: unknown role {role!r}. {did_you_mean(role, ROLES)}")
    return match[3], Identity(subject=match[1], roles=frozenset(roles))
