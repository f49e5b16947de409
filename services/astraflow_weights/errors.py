"""What can go wrong on the weight path, as kinds of the one error tree in `astraflow.errors`.

    RetryableError    Unavailable        the store cannot answer now
                      StoreMissing       its folder is not there, or another store is in its place
                      StoreReadOnly      it may not be written now
                      StoreFull          there is no space left in it
    RequestError      ObjectNotFound     no object under that key
                      StoreRefused       the store cannot hold weight versions, or its settings are wrong
                      ModelMismatch      two models differ in names, dtypes or shapes: a new policy
                      NeedsBase          a delta cannot be merged or inverted without the model before it
    StateError        Fenced             a writer with a higher epoch owns the log
                      NoPath             nothing in the log leads to that version
                      MirrorBusy         another process is changing this mirror
                      MirrorMismatch     the folder mirrors another run or policy
                      StateInDoubt       server, store and checkpoints contradict each other
    AstraflowError    CorruptPart        bytes that are not the part they claim to be; nothing was changed
                      CorruptManifest    a log entry that is damaged or contradicts the log
                      VerificationFailed a version could not be reproduced bit by bit; the old one is intact

Kinds are chosen by what the caller does next. Every module of this package raises only these for bad data
and bad stores, and ValueError for calls that are wrong in the caller's own code.
"""

from dataclasses import dataclass

from astraflow.errors import (
    AstraflowError,
    FencedError,
    NotFoundError,
    PreconditionError,
    RequestError,
    StateError,
    UnavailableError,
)


class Unavailable(UnavailableError):
    """The store did not answer, or answered with a passing fault, until the operation's retries were used up.

    The operation may or may not have happened. Every operation of a store may be repeated.
    """

    wait = "store_unreachable"
    """What one who repeats it waits for, as `why` says it."""


class StoreMissing(Unavailable):
    """The folder of a store that was used before is not there, or holds another store: it is not mounted. Nothing was
    written.
    """

    wait = "store_missing"


class StoreReadOnly(Unavailable):
    """A store that was used before may not be written now: a read-only mount, or another owner or mode."""

    wait = "store_read_only"


class StoreFull(Unavailable):
    """There is no space, or no quota, left."""

    wait = "store_full"


class ObjectNotFound(NotFoundError):
    """The store has no object under the key."""


class StoreRefused(RequestError):
    """The store, its address or its credentials cannot be used; trying again changes nothing."""

    reason, code = "STORE_REFUSED", "FAILED_PRECONDITION"


class ModelMismatch(RequestError):
    """A delta was asked for between models that differ in tensor names, dtypes or shapes."""

    reason, code = "MODEL_MISMATCH", "INVALID_ARGUMENT"


class NeedsBase(RequestError):
    """A delta counts inside classes of its base's values, and the base was not given."""

    reason, code = "NEEDS_BASE", "FAILED_PRECONDITION"


class Fenced(FencedError):
    """Another writer with the same or a higher epoch owns the log. Stop publishing; claim the policy anew."""


class NoPath(StateError):
    """No chain of snapshots and deltas in the log leads to the version."""

    reason, code = "NO_PATH", "FAILED_PRECONDITION"


class MirrorBusy(StateError):
    """Another process holds the mirror's lock."""

    reason, code = "MIRROR_BUSY", "ABORTED"


class MirrorMismatch(StateError):
    """The mirror's folder holds versions of another run or policy."""

    reason, code = "MIRROR_MISMATCH", "FAILED_PRECONDITION"


class StateInDoubt(PreconditionError):
    """Dataflow server, store and checkpoints of a policy do not tell of one past: nobody goes on.

    The message has both values and the remedies. A person decides.
    """


class CorruptPart(AstraflowError):
    """A part is damaged, truncated, missing, duplicated or made for another model."""

    reason, code = "CORRUPT_PART", "DATA_LOSS"


class CorruptManifest(AstraflowError):
    """An entry of the log is damaged, or says something that the entries before it exclude."""

    reason, code = "CORRUPT_MANIFEST", "DATA_LOSS"


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One path to a version in the log: from `base_version`, or from nothing (a snapshot) when that is
    None.
    """

    version: int
    base_version: int | None


class VerificationFailed(AstraflowError):
    """A version could not be reproduced exactly; what was held before is intact, or known to be damaged.

    `tensor` is empty when the fault is in a part rather than in one tensor, `tile` None unless it is in one tile of
    it. `edges` are the suspected paths in the log.
    """

    reason, code = "VERIFICATION_FAILED", "DATA_LOSS"

    def __init__(
        self,
        message: str,
        *,
        version: int,
        tensor: str = "",
        tile: int | None = None,
        edges: frozenset[Edge] = frozenset(),
    ) -> None:
        super().__init__(message, metadata={"version": str(version), "tensor": tensor})
        self.version = version
        self.tensor = tensor
        self.tile = tile
        self.edges = edges
