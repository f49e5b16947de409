"""The run's store as this node may read it: with its own credentials, or through what the dataflow server signs.

Invariant: which of both it is follows from the answer to JoinRun alone. Called by `server` once the node has joined.
"""

import asyncio

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_service_pb2
from astraflow.dataflow.v1 import version_service_pb2 as pb
from astraflow_kit.log import get_logger
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.granted import ReadKind, SignedReads, SignReads, StoreRead

log = get_logger(__name__)

_KINDS = {
    ReadKind.GET: pb.STORE_READ_KIND_GET,
    ReadKind.HEAD: pb.STORE_READ_KIND_HEAD,
    ReadKind.LIST: pb.STORE_READ_KIND_LIST,
}


def granted_store(
    joined: run_service_pb2.JoinRunResponse, own: ObjectStore, *, client: AsyncClient, settings: StoreSettings
) -> ObjectStore:
    """Return the store to read: `own` where nothing was granted. Called in the loop of `client`."""
    if not any(grant.signed_reads for grant in joined.store_grants):
        return own
    from astraflow_weights.store.s3_signed import open_signed_store  # boto3 is slow to import

    log.info("store.granted", store=joined.run.store_uri)
    sign = _signing(client, run_id=joined.run.run_id)
    return open_signed_store(joined.run.store_uri, sign=sign, settings=settings)


def _signing(client: AsyncClient, *, run_id: str) -> SignReads:
    """For threads that read the store; never called in the client's own loop."""
    loop = asyncio.get_running_loop()

    def sign(reads: tuple[StoreRead, ...]) -> SignedReads:
        asked = [pb.StoreRead(kind=_KINDS[read.kind], key=read.key, after=read.after) for read in reads]
        request = pb.SignReadsRequest(run_id=run_id, reads=asked)
        calling = asyncio.run_coroutine_threadsafe(client.call(client.versions.SignReads, request), loop)
        answer = calling.result()
        return SignedReads(urls=tuple(answer.urls), valid_s=answer.valid_duration.ToNanoseconds() / 1e9)

    return sign
