"""Publishes one model after another from a process that holds it whole: diff, encode, upload, commit.

Invariant: that of `ShardPublisher`, which does the work. Tools and tests call it; a trainer, sharded or not,
hands its shards to `ShardPublisher` itself.
"""

from collections.abc import Sequence
from pathlib import Path

from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.codec.shards import whole
from astraflow_weights.codec.tensors import Model
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter


class Publisher:
    """Owns the bytes of the newest version. One owner per object: not thread-safe; every call blocks.

    writer = VersionWriter.open(store, run_id="r1", policy_id="solver", epoch=epoch)
    publisher = Publisher(writer, base=None, assets=[folder / "config.json"])
    publisher.publish(model, step=0)
    """

    def __init__(
        self,
        writer: VersionWriter,
        *,
        base: Model | None,
        assets: Sequence[Path] = (),
        context: bool = False,
    ) -> None:
        """`base` holds the newest version's bytes, None when the log has no version; `assets` go with every
        version. `context` allows RICE_CTX in deltas.

        Raises ConflictError when `base` is not what the log's newest version holds: fetch that with a
        Mirror first.
        """
        self._shards = ShardPublisher(
            writer,
            uploads=writer.uploads,
            peers=OnePeer(),
            base=None if base is None else whole(base),
            assets=assets,
            context=context,
        )

    @property
    def newest(self) -> CommittedVersion | None:
        """The newest version in the log, as this publisher's writer last read it; None when there is none."""
        return self._shards.newest

    def committed_since(self, version: int | None) -> list[CommittedVersion]:
        """The versions in the log as last read after `version`, in order; all of them for None."""
        return self._shards.committed_since(version)

    def publish(self, model: Model, *, step: int, learning_rate: float | None = None) -> CommittedVersion:
        """Commit the model as the version of `step`; it must not change during the call.

        Idempotent for one (step, bytes), also across restarts: then nothing is sent and the existing
        version is returned. Raises Fenced for good, Unavailable (call again), ModelMismatch for another
        architecture.
        """
        return self._shards.publish(whole(model), step=step, learning_rate=learning_rate)
