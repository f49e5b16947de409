"""Reads of a run's store for nodes that hold no credentials of it: granted when they join, signed as they ask.

Invariant: a node gets addresses of its own run's objects, for reading, for a limited time, and never a credential.
Called by the run and version services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1 import version_service_pb2 as pb
from astraflow.errors import InvalidArgumentError, PreconditionError
from astraflow.rollout.v1 import blob_pb2
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store.granted import ReadKind, SignedReads, StoreRead

if TYPE_CHECKING:
    from astraflow_weights.store.s3_signing import ReadSigner

_KINDS = {
    pb.STORE_READ_KIND_GET: ReadKind.GET,
    pb.STORE_READ_KIND_HEAD: ReadKind.HEAD,
    pb.STORE_READ_KIND_LIST: ReadKind.LIST,
}


class StoreGrants:
    """What nodes may read of the stores of their runs, through this server."""

    def __init__(self, signer: ReadSigner | None, *, life_s: float) -> None:
        """Without a `signer` nothing is granted, and nodes use what their own environment gives them."""
        self._signer = signer
        self._life_s = life_s

    @classmethod
    def over(cls, settings: StoreSettings, *, life_s: float) -> StoreGrants:
        """Grants that are signed with the credentials of `settings`. Raises StoreRefused when there are none."""
        from astraflow_weights.store.s3_signing import (
            ReadSigner,
        )  # boto3 is slow to import, and few servers grant

        return cls(ReadSigner(settings, life_s=life_s), life_s=life_s)

    def of(self, run: run_pb2.Run) -> list[blob_pb2.StoreGrant]:
        """The grants that a node of the run gets when it joins."""
        if not self._grants(run):
            return []
        grant = blob_pb2.StoreGrant(
            uri_prefix=f"{run.store_uri.rstrip('/')}/{run.run_id}/",
            access=blob_pb2.STORE_ACCESS_READ,
            signed_reads=True,
        )
        grant.expire_time.FromDatetime(datetime.now(tz=UTC) + timedelta(seconds=self._life_s))
        return [grant]

    async def sign(self, run: run_pb2.Run, reads: Sequence[pb.StoreRead]) -> pb.SignReadsResponse:
        """Sign reads. Raises PreconditionError, InvalidArgumentError, StoreRefused."""
        if self._signer is None or not self._grants(run):
            raise PreconditionError(
                f"this server grants no reads of {run.store_uri}; start it with --store-grants, or give nodes "
                "credentials of the store"
            )
        try:
            signed = await asyncio.to_thread(self._sign, self._signer, run, reads)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error
        answer = pb.SignReadsResponse(urls=signed.urls)
        answer.valid_duration.FromMilliseconds(int(signed.valid_s * 1000))
        return answer

    def _sign(self, signer: ReadSigner, run: run_pb2.Run, reads: Sequence[pb.StoreRead]) -> SignedReads:
        return signer.sign(run.store_uri, [_read(read) for read in reads], run_id=run.run_id)

    def _grants(self, run: run_pb2.Run) -> bool:
        return self._signer is not None and run.store_uri.startswith("s3://")


def _read(read: pb.StoreRead) -> StoreRead:
    return StoreRead(kind=_KINDS[read.kind], key=read.key, after=read.after)
