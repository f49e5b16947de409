"""What stands before every rpc: whose token it is, whether its role may call, and whether it may speak of that run.

Invariant: `admit` and `prove` judge by metadata alone, before any message is received: a call passes only with a role
that the contract of its rpc names, as the node or trainer that its credential proves. None of its messages then names a
run, policy or pool that its token is not for. Called by `serve`; servicers read the caller through `caller()`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from google.protobuf.message import Message

from astraflow._contract.rpcs import RpcContract
from astraflow.errors import PermissionError_, UnauthenticatedError
from astraflow_kit.identity import speakers
from astraflow_kit.identity.scopes import narrow
from astraflow_kit.identity.tokens import ALL, OPEN_TO_ALL, ROLES, Identity, refusal
from astraflow_kit.identity.verifier import Verifier

ANYONE = Identity(subject="anonymous", roles=frozenset(ROLES))
STRANGER = Identity(subject="stranger", roles=frozenset())
"""Somebody without proof at a server that asks for it: calls what is open to anyone, and is not listened to."""
_AUTHORIZATION = "authorization"
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
    """Decides whether a call may proceed. Without a verifier every caller has every role, on every run."""

    def __init__(
        self,
        contracts: Mapping[str, RpcContract],
        *,
        verifier: Verifier | None,
        run_id: str = "",
        knows_peers: bool = False,
        keys: speakers.SessionKeys | None = None,
    ) -> None:
        """`run_id` is the run that the daemon belongs to, of a daemon that has one; `knows_peers` where every
        connection has shown a certificate of the clients' authority; `keys` prove as whom callers speak.
        """
        self._contracts = contracts
        self._keys = keys
        self._verifier = verifier
        self._run_id = run_id
        self._knows_peers = knows_peers

    def admit(self, rpc: str, metadata: Mapping[str, str]) -> Identity:
        """Return the caller of `rpc` (`/package.Service/Method`) and remember it for `caller`; STRANGER for one whose
        messages are not to be received.

        Raises UnauthenticatedError for a token that is missing or not accepted, PermissionError_ for one of a role
        that is not allowed or, where the request does not say, of other runs.
        """
        contract, authorization = self._contracts.get(rpc), metadata.get(_AUTHORIZATION)
        if contract is None or OPEN_TO_ALL in contract.roles:  # they tell nothing about runs, as health
            return ANYONE if self._may_be_heard(authorization) else STRANGER
        identity = self._identify(authorization)
        _caller.set(identity)
        self._require_allowed(identity, rpc, contract)
        return identity

    def _may_be_heard(self, authorization: str | None) -> bool:
        if self._verifier is None or self._knows_peers:
            return True
        try:
            self._verifier.identify(authorization)
        except UnauthenticatedError:
            return False
        return True

    async def prove(self, rpc: str, metadata: Mapping[str, str]) -> None:
        """Find out as whom `caller` speaks. Raises UnauthenticatedError, PermissionError_."""
        contract = self._contracts.get(rpc)
        if contract is not None and self._keys is not None:
            await speakers.prove(contract, metadata, keys=self._keys, identity=caller())

    def allow(self, rpc: str, identity: Identity) -> None:
        """The same for a caller that was identified otherwise, as readers of pages are. Raises PermissionError_."""
        self._require_allowed(identity, rpc, self._contracts[rpc])

    def _require_allowed(self, identity: Identity, rpc: str, contract: RpcContract) -> None:
        if OPEN_TO_ALL in contract.roles:
            return
        if not identity.roles & contract.roles:
            has = f"{identity.subject!r} has role {', '.join(identity.roles)}"
            raise denied("role", f"{has}; {rpc} is for {sorted(contract.roles)}")
        needed = {"served_run": self._run_id, "all_runs": ALL}.get(contract.scope)
        if needed is not None and not identity.may_see(needed):
            about = "all runs" if needed == ALL else f"run {needed!r}"
            raise denied(
                "run",
                f"{rpc} is about {about}; the token of {identity.subject!r} is for {_list(identity.runs)}",
            )

    def narrow(self, rpc: str, request: object) -> None:
        """Hold a request of `rpc` against what the token of `caller` is for, and as whom it speaks.

        Raises PermissionError_ naming what it is not for.
        """
        if not isinstance(request, Message) or rpc not in self._contracts:
            return
        identity = caller()
        found = narrow(request, identity) if identity.is_narrow else None
        if found is None:
            if self._keys is not None:
                speakers.hold(self._contracts[rpc], request, identity=identity)
            return
        what = f"{found.kind} {found.name!r}" if found.name else f"no {found.kind}, so name one;"
        raise denied(
            found.kind,
            f"the request of {rpc} names {what} but the token of {identity.subject!r} is for {_list(found.allowed)}",
        )

    def _identify(self, authorization: str | None) -> Identity:
        if self._verifier is not None:
            return self._verifier.identify(authorization)
        if authorization is None:
            return ANYONE
        raise refusal(
            "no_keys",
            "a token was sent but this server knows no keys; start it with token_keys_file, or send no token",
        )


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "none"


def denied(reason: str, message: str) -> PermissionError_:
    """The error for a caller that is known and may not; `reason` is a slug, which also labels the metric."""
    return PermissionError_(message, metadata={"reason": reason})
