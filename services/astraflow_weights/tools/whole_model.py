"""Publishes the versions of a model that one process holds whole: what a trainer that is not ours needs.

Invariant: as `ShardPublisher` has it; each version is announced when it is committed, in order. Called by such trainers
(clients/python/examples), from the thread that trains.
"""

from collections.abc import Sequence
from pathlib import Path

from astraflow.client import Client
from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.codec.shards import whole
from astraflow_weights.codec.tensors import Model
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.announcing import Announcer
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store import ObjectStore


class WholeModelPublisher:
    """Versions of one policy under one claimed epoch. Not thread-safe; every call blocks."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        client: Client,
        run_id: str,
        policy_id: str,
        epoch: int,
        folder: Path,
        assets: Sequence[Path] = (),
    ) -> None:
        """Fence older writers and fetch the newest version into `folder`.

        `assets` (configuration, tokenizer, chat template) travel with each version. Raises Fenced, and as
        `Mirror.advance` does.
        """
        writer = VersionWriter.open(store, run_id=run_id, policy_id=policy_id, epoch=epoch)
        newest = writer.newest
        self.version, self.step = (newest.version, newest.step) if newest else (-1, -1)
        """The newest version and its step; -1 before the first."""
        self.model_dir: Path | None = None
        """A Hugging Face directory of what was the newest version at the start; None when there was none."""
        if newest is not None:
            self.model_dir = Mirror(folder).advance(store, writer.log, target=newest.version).directory
        base = None if self.model_dir is None else whole(map_model(self.model_dir))
        self._publisher = ShardPublisher(
            writer, uploads=writer.uploads, peers=OnePeer(), base=base, assets=assets
        )
        self._announcer = Announcer(client, run_id=run_id, policy_id=policy_id, epoch=epoch)
        self._announcer.announce_missing(writer)

    def publish(self, model: Model, *, step: int) -> None:
        """Commit bfloat16 tensors, as uint16 bits under the names of a Hugging Face checkpoint, as the version of
        `step`, and announce it. Idempotent for one step and its bytes. Raises as `ShardPublisher.publish` does.
        """
        committed = self._publisher.publish(whole(model), step=step)
        self._announcer.announce_missing(self._publisher)
        self.version, self.step = committed.version, committed.step
