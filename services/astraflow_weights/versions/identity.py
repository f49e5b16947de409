"""Which run a policy's objects in the store belong to: one small create-only object beside the log.

Invariant: it is created once, by the first trainer of the policy, and never changes; a run of the same name that
another Redis has is another run, and its identity another. Trainers and collectors compare it with the server's.
"""

import re

from astraflow.errors import ConflictError, IncompatibleError
from astraflow_weights.errors import ObjectNotFound
from astraflow_weights.store import ObjectStore, PutResult
from astraflow_weights.store.layout import PolicyKeys

_IDENTITY = re.compile(r"[0-9a-f]{32}")


def read_identity(store: ObjectStore, keys: PolicyKeys) -> str:
    """Identity of the run as 32 hex digits; empty when no trainer has written here. Raises IncompatibleError."""
    try:
        text = store.get(keys.identity).decode("ascii", errors="replace").strip()
    except ObjectNotFound:
        return ""
    if not _IDENTITY.fullmatch(text):
        raise IncompatibleError(
            f"{store.uri}/{keys.identity} holds {text[:64]!r} instead of 32 hex digits; restore it from a copy"
        )
    return text


def remember_identity(store: ObjectStore, keys: PolicyKeys, identity: str) -> None:
    """Write the identity where there is none. Raises ConflictError where there is another."""
    if store.put_if_absent(keys.identity, f"{identity}\n".encode()) is PutResult.CREATED:
        return
    if (found := read_identity(store, keys)) != identity:
        raise ConflictError(
            f"{store.uri}/{keys.root} belongs to the run of identity {found}, this one is {identity}; give this run "
            "another store or another run id"
        )
