"""References to large side data in the run's store: where they may lie, how they are made, what is wrong with one.

Invariant: a reference that passes lies under the run's own prefix and pins size and digest, so reading it can reach
neither another run nor other bytes. Used by nodes that write blobs and by the server that takes their trajectories.
"""

import hashlib
import re

from astraflow._contract.bounds import judge
from astraflow.rollout.v1 import blob_pb2

__all__ = ["blob_prefix", "blob_problem", "blob_ref", "expert_blobs"]

_NAME = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*(/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)*")


def blob_prefix(store_uri: str, run_id: str) -> str:
    """Where the blobs of a run lie in its store."""
    return f"{store_uri.rstrip('/')}/{run_id}/blobs/"


def expert_blobs(policy_id: str, *, version: int | None = None) -> str:
    """Below that: the expert routings of a policy's trajectories whose newest token is of `version`, or of all.
    Ascending versions have ascending names.
    """
    return f"experts/{policy_id}/" + ("" if version is None else f"{version:012d}/")


def blob_ref(content: bytes, *, name: str, prefix: str, media_type: str) -> blob_pb2.BlobRef:
    """The reference to `content`, which the caller has put under `prefix` + `name`. Raises ValueError."""
    ref = blob_pb2.BlobRef(
        uri=prefix + name,
        sha256=hashlib.sha256(content).digest(),
        num_bytes=len(content),
        media_type=media_type,
    )
    problem = blob_problem(ref, prefix=prefix)
    if problem is not None:
        raise ValueError(problem)
    return ref


def blob_problem(ref: blob_pb2.BlobRef, *, prefix: str) -> str | None:
    """What is wrong with a reference, with value, limit and remedy; None when it can be used."""
    if problem := judge(ref):
        return problem[1]
    name = ref.uri.removeprefix(prefix)
    if name == ref.uri or not _NAME.fullmatch(name):
        return f"blob {ref.uri!r} is not a plain name under {prefix!r}; write it there before referring to it"
    return None
