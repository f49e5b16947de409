"""As whom a call speaks: a node or a trainer of one run, by the credential that JoinRun or ClaimPolicy gave it.

Invariant: where the contract of an rpc says that a node or a trainer speaks, its credential was sealed by the run's key
before the request is read, and what the request says of its speaker is what the credential says, or empty and filled
in. Episodes are left to whoever takes them in, since a push answers for each; the epoch that wrote a version may be an
earlier one. Called by `gate`; servicers read the speaker through `speaker()`.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Protocol

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from astraflow._contract.rpcs import RpcContract
from astraflow.dataflow.v1.run_service_pb2 import JoinRunRequest
from astraflow.dataflow.v1.version_pb2 import Version
from astraflow.errors import NotFoundError, PermissionError_, UnauthenticatedError
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_kit.identity.scopes import holders, paths_to
from astraflow_kit.identity.sealing import NODE, TRAINER, Session, claimed_session, is_issued
from astraflow_kit.identity.tokens import Identity

METADATA = "astraflow-session"
OPENED_BY = {NODE: "JoinRun", TRAINER: "ClaimPolicy"}
_NAMED_BY = {
    NODE: {"run_id": "run_id", "node_id": "name", "incarnation": "number"},
    TRAINER: {"run_id": "run_id", "policy_id": "name", "trainer_epoch": "number"},
}
"""Fields of requests, and what of the session each is compared with."""
_OPENS = ("opens_node", "opens_trainer")
_SPEAKERS = {"node": NODE, "trainer": TRAINER, "trainer_once_claimed": TRAINER}
_session: ContextVar[Session | None] = ContextVar("astraflow_session", default=None)


class SessionKeys(Protocol):
    """Knows the keys that seal the credentials of runs."""

    async def seal_key(self, run_id: str) -> str:
        """The key of a run. Raises NotFoundError where there is no such run."""


def speaker() -> Session | None:
    """The proven session behind the rpc being served; None where none is asked for, or its caller has none yet."""
    return _session.get()


def speaking_node() -> Session:
    """The node behind the rpc being served, whose contract asks for one."""
    session = speaker()
    if session is None or session.speaker != NODE:
        raise RuntimeError("this rpc was served without proof of the node: its contract lacks SPEAKER_NODE")
    return session


async def prove(
    contract: RpcContract, metadata: Mapping[str, str], *, keys: SessionKeys, identity: Identity
) -> None:
    """Find out as whom the call speaks, for `speaker`. Raises UnauthenticatedError whose metadata `reason` is
    `no_session` or `wrong_session`, PermissionError_ for a session that is not the caller's to use, NotFoundError for
    one of a run that was deleted.
    """
    credential, wanted = metadata.get(METADATA, ""), _SPEAKERS.get(contract.speaker)
    _session.set(None)
    if contract.speaker in _OPENS:
        try:
            _session.set(await _proven(credential, keys=keys, identity=identity))
        except (NotFoundError, PermissionError_):
            return  # whoever opens a session shows an older one if it can, and is somebody new if it cannot
    elif wanted is not None and credential:
        session = await _proven(credential, keys=keys, identity=identity)
        _session.set(_suiting(session, contract, wanted=wanted, identity=identity))
    elif wanted is not None and contract.speaker != "trainer_once_claimed":
        raise _no_session(contract, wanted)


async def _proven(credential: str, *, keys: SessionKeys, identity: Identity) -> Session | None:
    """The session of a credential that the run's key sealed."""
    claimed = claimed_session(credential)
    if claimed is None:
        return None
    if not identity.may_see(claimed.run_id):  # and nobody learns whether there is such a run
        raise PermissionError_(
            f"the session is of run {claimed.run_id!r}, and the token of {identity.subject!r} is not for it",
            metadata={"reason": "run"},
        )
    return claimed if is_issued(credential, key=await keys.seal_key(claimed.run_id)) else None


def _suiting(session: Session | None, contract: RpcContract, *, wanted: str, identity: Identity) -> Session:
    if session is None:
        raise UnauthenticatedError(
            f"the metadata `{METADATA}` of {contract.name} is no credential that this server gave out; send what "
            f"{OPENED_BY[wanted]} returned last",
            metadata={"reason": "wrong_session"},
        )
    if session.speaker != wanted:
        raise wrong_session(
            f"{contract.name} is called by a {wanted}, the credential is that of {session.speaker} {session.name!r}; "
            f"send what {OPENED_BY[wanted]} returned"
        )
    if wanted == NODE:
        _require_node(session.name, identity)
    return session


def _require_node(node_id: str, identity: Identity) -> None:
    if not identity.may_be(node_id):
        raise PermissionError_(
            f"the token of {identity.subject!r} is for the nodes {', '.join(sorted(identity.nodes)[:8]) or 'none'}, "
            f"not {node_id!r}; choose one of these (--node-id), or ask for a token with --node {node_id}",
            metadata={"reason": "node"},
        )


def hold(contract: RpcContract, request: Message, *, identity: Identity) -> None:
    """Compare what a request says of its speaker with the session, and fill in what it leaves out.

    Raises PermissionError_ whose metadata `reason` is `wrong_session`, or `node` for a node that joins under a name
    that its token is not for; UnauthenticatedError `no_session` for a trainer that names an epoch without credential.
    """
    wanted, session = _SPEAKERS.get(contract.speaker), speaker()
    if isinstance(request, JoinRunRequest):
        _require_node(request.node_id, identity)
    if wanted is None:
        return
    for path in _compared(request.DESCRIPTOR, wanted):
        field = path[-1]
        for holder in holders(request, path[:-1]):
            if session is not None:
                _hold_field(contract, holder, field.name, session)
            elif field.name == "trainer_epoch" and getattr(holder, field.name):
                raise _no_session(contract, wanted)


def _hold_field(contract: RpcContract, holder: Message, name: str, session: Session) -> None:
    named, own = getattr(holder, name), getattr(session, _NAMED_BY[session.speaker][name])
    if named and named != own:
        raise wrong_session(
            f"the request of {contract.name} names {name} {named!r}, its session is of {own!r}; leave the field out, "
            f"or send the credential that {OPENED_BY[session.speaker]} returned for {named!r}"
        )
    is_unclaimed = name == "trainer_epoch" and contract.speaker == "trainer_once_claimed"
    if not named and not is_unclaimed:  # without an epoch a trainer is listened to, and holds nothing
        setattr(holder, name, own)


def _is_anothers(path: tuple[FieldDescriptor, ...]) -> bool:
    """Whether a field says of somebody else what fields of its name say of the speaker."""
    within = [step.message_type for step in path[:-1]]
    return Episode.DESCRIPTOR in within or (Version.DESCRIPTOR in within and path[-1].name == "trainer_epoch")


@cache
def _compared(request: Descriptor, wanted: str) -> tuple[tuple[FieldDescriptor, ...], ...]:
    """Paths to the fields of a request that say who its speaker is."""
    return tuple(
        path
        for path in paths_to(request, frozenset(_NAMED_BY[wanted]))
        if not path[-1].is_repeated and not _is_anothers(path)
    )


def wrong_session(message: str) -> PermissionError_:
    """The error for a session that speaks of what is another's."""
    return PermissionError_(message, metadata={"reason": "wrong_session"})


def _no_session(contract: RpcContract, wanted: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"{contract.name} needs the metadata `{METADATA}`: the credential that {OPENED_BY[wanted]} returned; call that "
        "first, and send its `session` with every later call (update clients of contract version 3 and older)",
        metadata={"reason": "no_session"},
    )
