"""The experts that an episode's tokens went to: kept call by call, put into the run's store trajectory by trajectory.

Invariant: a token that was sampled has the experts of the call that sampled it, though later calls read it again; a
trajectory with a trained token that no call had in its place has none at all. What the store does not take costs the
trajectory its experts and nothing else: the trainer's own router chooses then, as for rows without. Made by `session`.

Shape legend: S tokens of a call that a layer has seen, T tokens of a trajectory, X layers with experts, K experts of a
token.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.blobs import blob_prefix, blob_ref, expert_blobs
from astraflow.plugins import Trajectory
from astraflow.rollout.v1 import blob_pb2
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_weights.errors import StoreRefused, Unavailable
from astraflow_weights.store import ObjectStore

log = get_logger(__name__)

_PROBE = b"nodes may write here"


@dataclass(frozen=True, slots=True)
class _Call:
    tokens: NDArray[np.int64]
    """Prompt and answer."""
    before: "_Call | None"
    """The call that it continues."""
    later_SXK: NDArray[np.unsignedinteger]
    """Its own rows: those behind the ones of `before`."""

    @property
    def routed_SXK(self) -> NDArray[np.unsignedinteger]:
        """All rows."""
        parts, call = [self.later_SXK], self.before
        while call is not None:
            parts.append(call.later_SXK)
            call = call.before
        return np.concatenate(parts[::-1])


class ExpertRecord:
    """The calls of one episode under one policy."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, token_ids: Sequence[int], routed_SXK: NDArray[np.unsignedinteger]) -> None:
        """Keep a call: prompt and answer, and the experts of all but the last of these tokens."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        before = self._longest(tokens)
        num_known = 0 if before is None else len(before.tokens) - 1
        self._calls.append(_Call(tokens, before, routed_SXK[num_known:].copy()))

    def of(self, trajectory: Trajectory) -> NDArray[np.unsignedinteger] | None:
        """[T, X, K]; None where a trained token was not in its place in any call."""
        tokens = np.asarray(trajectory.token_ids, dtype=np.int64)
        call = self._longest(tokens)
        trained = np.flatnonzero(np.fromiter(trajectory.loss_mask, dtype=bool))
        if call is None or (trained.size and trained[-1] >= len(call.tokens)):
            return None
        routed_SXK = call.routed_SXK
        num_seen, layers, each = routed_SXK.shape
        # What follows the last sampled token is read by no trained one: any experts will do.
        rest = np.broadcast_to(
            np.arange(each, dtype=routed_SXK.dtype), (len(tokens) - num_seen, layers, each)
        )
        return np.concatenate((routed_SXK, rest))

    def _longest(self, tokens: NDArray[np.int64]) -> _Call | None:
        """The longest call that `tokens` begin with."""
        found = [call for call in self._calls if _begins(tokens, call.tokens)]
        return max(found, key=lambda call: len(call.tokens), default=None)


class ExpertBlobs:
    """Where a node puts them. Thread-safe."""

    def __init__(self, store: ObjectStore, *, store_uri: str, run_id: str, metrics: Metrics) -> None:
        self._store, self._run_id, self._metrics = store, run_id, metrics
        self._prefix = blob_prefix(store_uri, run_id)

    def require_writable(self) -> None:
        """Raises StoreRefused where this node may not write into the run's store."""
        try:
            self._put(_PROBE, below="experts/-/", media_type="text/plain")  # no policy is called so
        except StoreRefused as error:
            raise StoreRefused(
                f"{error.message}; trainer.router_replay of the recipe needs nodes that may create objects below "
                f"{self._prefix}: give this node credentials for that, or leave router_replay out"
            ) from error

    async def refs(
        self, trajectories: Sequence[Trajectory], records: Mapping[str, Sequence[ExpertRecord]]
    ) -> list[blob_pb2.BlobRef | None]:
        """What each trajectory refers to, in the store already; `records` are those of policies that have any."""
        return [
            await self._ref(each, records[each.policy]) if each.policy in records else None
            for each in trajectories
        ]

    async def _ref(self, trajectory: Trajectory, records: Sequence[ExpertRecord]) -> blob_pb2.BlobRef | None:
        found = (record.of(trajectory) for record in records)
        routed_TXK = next((routed for routed in found if routed is not None), None)
        if routed_TXK is None:
            log.warning("experts.not_recorded", policy_id=trajectory.policy, role=trajectory.role)
            return self._counted(None, outcome="not_recorded")
        newest = max((span.version for span in trajectory.version_spans), default=0)
        try:
            below = expert_blobs(trajectory.policy, version=newest)
            ref = await asyncio.to_thread(self._put_routing, routed_TXK, below=below)
        except (StoreRefused, Unavailable) as error:
            log.warning("experts.not_stored", num_bytes=routed_TXK.nbytes, message=error.message)
            return self._counted(None, outcome="not_stored")
        return self._counted(ref, outcome="stored")

    def _counted(self, ref: blob_pb2.BlobRef | None, *, outcome: str) -> blob_pb2.BlobRef | None:
        self._metrics.increment("astraflow_raas_expert_routings_total", outcome=outcome)
        return ref

    def _put_routing(self, routed_TXK: NDArray[np.unsignedinteger], *, below: str) -> blob_pb2.BlobRef:
        content = routed_TXK.astype(routed_TXK.dtype.newbyteorder("<")).tobytes()
        _, layers, each = routed_TXK.shape
        media_type = f"application/x-astraflow-expert-routing; layers={layers}; k={each}; dtype={routed_TXK.dtype.name}"
        return self._put(content, below=below, media_type=media_type)

    def _put(self, content: bytes, *, below: str, media_type: str) -> blob_pb2.BlobRef:
        """Named by its digest, so that what is there already is the same."""
        name = f"{below}{hashlib.sha256(content).hexdigest()}"
        self._store.put_if_absent(f"{self._run_id}/blobs/{name}", content)
        return blob_ref(content, name=name, prefix=self._prefix, media_type=media_type)


def _begins(tokens: NDArray[np.int64], start: NDArray[np.int64]) -> bool:
    return len(start) <= len(tokens) and bool((tokens[: len(start)] == start).all())
