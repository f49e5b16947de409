"""Whether the server that answered a claim knows what the store and this trainer's checkpoints know.

Invariant: it reads, and writes nothing but the identity that the store does not have yet; so a trainer that does not
go on has changed nothing. The session asks after every claim.
"""

from pathlib import Path

from astraflow_trainer.batches.source import Claim
from astraflow_trainer.model.checkpoint import read_positions
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.identity import read_identity, remember_identity
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.standing import Doubt, Known, ServerStanding, compare


class Comparison:
    """What store and checkpoints know now, to compare a claim with."""

    def __init__(self, store: ObjectStore, log: VersionLog, *, checkpoints: Path) -> None:
        """`log` has been read. Raises as the store does, IncompatibleError."""
        self._store = store
        self._keys = PolicyKeys(log.run_id, log.policy_id)
        positions = read_positions(checkpoints)
        self._known = Known(
            store_identity=read_identity(store, self._keys),
            versions=log.records,
            checkpoint_identity=positions[-1].identity if positions else "",
            checkpoint_steps=tuple(position.step for position in positions),
            checkpoint_version=positions[-1].version if positions else None,
        )

    @property
    def identity(self) -> str:
        """Of the run that store and checkpoints belong to; empty when they do not say."""
        return self._known.identity

    def doubt(self, claim: Claim) -> Doubt | None:
        """Why nobody may go on from `claim`."""
        server = ServerStanding(
            identity=claim.identity,
            finished_step=claim.last_finished_step,
            version=claim.version,
            durable_step=claim.last_durable_step,
        )
        return compare(server, self._known)

    def remember(self, identity: str) -> None:
        """Let the store know whose it is."""
        if identity and not self._known.store_identity:
            remember_identity(self._store, self._keys, identity)
