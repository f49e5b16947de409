"""Telling the dataflow server of committed versions: nodes activate no others.

Invariant: every version in the log that can be read is announced, in order, none before those below it; also those
that the server knew before its Redis lost them. The trainer's publishing thread calls it, and a rollback.
"""

from collections.abc import Sequence
from typing import Protocol

from astraflow.client import Client
from astraflow.dataflow.v1 import version_pb2, version_service_pb2
from astraflow_weights.publish.version_writer import CommittedVersion


class Committed(Protocol):
    """Who knows the log: a version writer or a publisher."""

    def committed_since(self, version: int | None) -> Sequence[CommittedVersion]:
        """Return the versions in the store's log after `version`, in order; all of them for None."""


class Announcer:
    """Announces under one claimed epoch. Blocking; for one thread at a time."""

    def __init__(self, client: Client, *, run_id: str, policy_id: str, epoch: int) -> None:
        self._client = client
        self._run_id = run_id
        self.policy_id = policy_id
        self._epoch = epoch

    def announce_missing(self, log: Committed) -> None:
        """Announce, in order, every version in the log that can be read and the server does not know."""
        before = self._newest_announced()
        for committed in log.committed_since(before):
            next_number = 0 if before is None else before + 1
            self._announce(committed, num_unreadable_before=committed.version - next_number)
            before = committed.version

    def _announce(self, committed: CommittedVersion, *, num_unreadable_before: int) -> None:
        version = version_pb2.Version(
            policy_id=self.policy_id,
            version=committed.version,
            sequence=committed.sequence,
            manifest_sha256=committed.manifest_sha256,
            step=committed.step,
            trainer_epoch=committed.writer_epoch,
            delta_bytes=committed.delta_bytes,
            snapshot_bytes=committed.snapshot_bytes,
            density=committed.density,
            rollback_of=committed.rollback_of,
        )
        request = version_service_pb2.PublishRequest(
            run_id=self._run_id,
            version=version,
            trainer_epoch=self._epoch,
            num_unreadable_before=num_unreadable_before,
        )
        self._client.call(self._client.versions.Publish, request)

    def _newest_announced(self) -> int | None:
        request = version_service_pb2.ListVersionsRequest(
            run_id=self._run_id, policy_id=self.policy_id, page_size=1
        )
        versions = self._client.call(self._client.versions.ListVersions, request).versions
        return versions[0].version if versions else None
