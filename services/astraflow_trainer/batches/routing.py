"""Expert routing that an engine recorded: which experts each token of a row went to, for the trainer to replay.

Invariant: what a row carries is what its reference pins, and of the shape of the model's own routers; anything else is
named and goes with its group; and what no batch can refer to any more is deleted. Formats are those of
`Trajectory.expert_routing`. Called by the batch source, the training step and the session. Shape legend: T tokens of a
row, X mixture-of-experts layers, K experts of a token.
"""

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from astraflow.blobs import expert_blobs
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import blob_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_kit.log import get_logger
from astraflow_weights.store import ObjectStore

log = get_logger(__name__)

_DELETED_AT_ONCE = 16
ReadBlob = Callable[[str], bytes]
"""The bytes of a blob by its URI. Raises LookupError where there are none."""
_MEDIA_TYPE = re.compile(
    r"application/x-astraflow-expert-routing; layers=(\d{1,4}); k=(\d{1,4}); dtype=(uint8|uint16)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """The routers of a model; a dense one has none."""

    num_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0

    def require(self, name: str, routed_TXK: NDArray[np.uint16] | None) -> None:
        """Raise BadTrajectory for a row's routing that these routers cannot replay."""
        if routed_TXK is None:
            return
        _, layers, each = routed_TXK.shape
        if (layers, each) != (self.num_layers, self.experts_per_token):
            raise BadTrajectory(
                "bad_blob",
                f"{name}: its expert routing has {layers} layers and {each} experts a token, the model "
                f"{self.num_layers} and {self.experts_per_token}; record it with the policy's own model",
            )
        if int(routed_TXK.max()) >= self.num_experts:
            raise BadTrajectory(
                "bad_blob",
                f"{name}: its expert routing names expert {routed_TXK.max()} of {self.num_experts}",
            )
        ordered = np.sort(routed_TXK, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise BadTrajectory("bad_blob", f"{name}: its expert routing sends a token to one expert twice")


def recorded_routing(
    ref: blob_pb2.BlobRef, *, name: str, num_tokens: int, read: ReadBlob
) -> NDArray[np.uint16]:
    """uint16[T, X, K] of what `ref` refers to. Raises BadTrajectory where it is gone, or not what it says."""
    described = _MEDIA_TYPE.fullmatch(ref.media_type)
    if described is None:
        raise BadTrajectory(
            "bad_blob",
            f"{name}: media type {ref.media_type!r} of its expert routing; give "
            "`application/x-astraflow-expert-routing; layers=L; k=K; dtype=uint8`, or uint16",
        )
    layers, each, width = int(described[1]), int(described[2]), np.dtype(described[3]).newbyteorder("<")
    expected = num_tokens * layers * each * width.itemsize
    try:
        content = read(ref.uri)
    except LookupError as error:
        raise BadTrajectory("bad_blob", f"{name}: its expert routing is gone: {error}") from error
    if hashlib.sha256(content).digest() != ref.sha256:
        raise BadTrajectory("bad_blob", f"{name}: {ref.uri} holds other bytes than were pushed")
    if len(content) != expected or not expected:
        raise BadTrajectory(
            "bad_blob",
            f"{name}: its expert routing has {len(content)} bytes, {num_tokens} tokens × {layers} layers × {each} "
            f"experts of {described[3]} are {expected}",
        )
    return np.frombuffer(content, dtype=width).astype(np.uint16).reshape(num_tokens, layers, each)


def delete_routing(store: ObjectStore, *, run_id: str, policy_id: str, before: int) -> None:
    """Delete what nodes recorded of trajectories whose newest token is of a version below `before`. A store that does
    not let go of them, or does not answer, is said in the log and asked again the next time.
    """
    blobs = f"{run_id}/blobs/"
    end = f"{blobs}{expert_blobs(policy_id, version=max(0, before))}"
    try:
        listed = store.list(f"{blobs}{expert_blobs(policy_id)}")
        keys = [info.key for info in takewhile(lambda info: info.key < end, listed)]
        with ThreadPoolExecutor(_DELETED_AT_ONCE, thread_name_prefix="old-routing") as threads:
            list(threads.map(store.delete, keys))
    except AstraflowError as error:
        log.warning("routing.not_deleted", before=before, reason=error.reason, message=error.message)
