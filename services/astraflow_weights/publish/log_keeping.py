"""Keeps a log quick to read and whole: checkpoints of it, and copies of entries that others refer to.

Invariant: creates what follows from the log, once, and deletes nothing but its own older checkpoints; killed at any
instant it leaves a log that reads the same. The compactor calls it.
"""

from astraflow_kit import failpoints
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.log import VersionLog

# The newest one, and what is left when it proves damaged.
_KEPT = 3


def keep_log(store: ObjectStore, log: VersionLog, *, every_entries: int) -> None:
    """Store the copies that are due, and a checkpoint of what `log` has read when `every_entries` are in none.

    Raises as the store does.
    """
    keys = PolicyKeys(log.run_id, log.policy_id)
    for sequence, entry in list(log.rescued.items()):
        store.put_if_absent(keys.copy(sequence), entry)
        del log.rescued[sequence]
    made = log.checkpoint() if log.next_sequence - log.checkpointed >= every_entries else None
    if made is None:
        return
    key, content = made
    # Whoever else made one of the same entries read the same log.
    store.put_if_absent(key, content)
    failpoints.hit("weights.log_checkpoint.stored")
    log.checkpointed = log.next_sequence
    own_and_older = sorted(info.key for info in store.list(keys.checkpoints) if info.key <= key)
    for superseded in own_and_older[:-_KEPT]:
        store.delete(superseded)
