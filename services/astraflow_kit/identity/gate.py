"""What stands before every rpc: whose token it is, and whether its role may call.

Invariant: a call passes only with a role that the contract of its rpc names. Called by `serve`; servicers read
the caller through `caller()`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from astraflow.errors import PermissionError_
from astraflow_kit.identity.tokens import OPEN_TO_ALL, ROLES, Identity, refusal
from astraflow_kit.identity.verifier import Verifier

ANYONE = Identity(subject="anonymous", roles=frozenset(ROLES))
_caller: ContextVar[Identity] = ContextVar("astraflow_caller", default=ANYONE)


def caller() -> Identity:
    """The identity behind the rpc being served."""
    return _caller.get()


@contextmanager
def speaking(identity: Identity) -> Iterator[None]:
    """Within the block, `caller` is this identity."""
    token = _caller.set(identity)
    try:
        yield
    finally:
        _caller.reset(token)


class Gate:
    """Decides whether a call may proceed. Without a verifier every caller has every role."""

    def __init__(self, roles_by_rpc: Mapping[str, frozenset[str]], *, verifier: Verifier | None) -> None:
        self._roles_by_rpc = roles_by_rpc
        self._verifier = verifier

    def admit(self, rpc: str, authorization: str | None) -> Identity:
        """Return the caller of `rpc` (`/package.Service/Method`) and remember it for `caller`.

        Raises UnauthenticatedError for a token that is missing or not accepted, PermissionError_ for a role not
        allowed.
        """
        allowed = self._roles_by_rpc.get(rpc)
        if allowed is None or OPEN_TO_ALL in allowed:
            return ANYONE  # they tell nothing about runs, as health and reflection
        identity = self._identify(authorization)
        if not identity.roles & allowed:
            raise denied(
                "role",
                f"{identity.subject!r} has role {', '.join(identity.roles)}; {rpc} is for {sorted(allowed)}",
            )
        _caller.set(identity)
        return identity

    def _identify(self, authorization: str | None) -> Identity:
        if self._verifier is not None:
            return self._verifier.identify(authorization)
        if authorization is None:
            return ANYONE
        raise refusal(
            "no_keys",
            "a token was sent but this server knows no keys; start it with token_keys_file, or send no token",
        )


def denied(reason: str, message: str) -> PermissionError_:
    """The error for a caller that is known and may not; `reason` is a slug, which also labels the metric."""
    return PermissionError_(message, metadata={"reason": reason})
