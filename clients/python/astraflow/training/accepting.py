"""What a trainer accepts of what it is handed: a batch as a whole, and each of its payloads.

Nodes and the server checked all of it when it was pushed, so what is refused here was damaged since, or comes from a
server that has another idea of the contract. Invariant: a batch is judged by itself and by what was asked for alone, so
every rank, and a replay, finds the same. Called by our trainer's batch source, and by `claimed` for others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astraflow.client import Client
from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2
from astraflow.errors import InternalError, NotFoundError
from astraflow.rollout.v1.trajectory_pb2 import Trajectory
from astraflow.trajectories import BadTrajectory, batch_digest, check_body

__all__ = ["BadBatch", "accepted_payload", "bad_batch", "fetch_bodies", "group_of", "quarantine"]

_FETCH_TIMEOUT_S, _PACK_BYTES = 120.0, 2**20
_MAX_QUARANTINED = 3
"""Batches in a row, so that what is wrong with a server does not cost a run its data."""


@dataclass(frozen=True, slots=True)
class BadBatch:
    """Why a batch cannot be trained on: a slug, and a sentence with the values."""

    slug: str
    detail: str


def group_of(item: batch_pb2.BatchItem) -> tuple[str, str]:
    """The group of an item: its task and role."""
    return item.task_id, item.role


def bad_batch(batch: batch_pb2.Batch, *, policy_id: str, step: int) -> BadBatch | None:
    """Why a batch that was acquired for a step is not what it says, or not what was asked for; None where it is."""
    if batch.policy_id != policy_id:
        return BadBatch("wrong_policy", f"it is of policy {batch.policy_id!r}, not of {policy_id!r}")
    if batch.step != step:
        return BadBatch("wrong_step", f"it is bound to step {batch.step}, not to {step}")
    if not batch.items:
        return BadBatch("empty", "it has no trajectories")
    digest = batch_digest(item.trajectory_id for item in batch.items)
    if batch.digest != digest:
        return BadBatch(
            "digest_mismatch",
            f"its digest is {batch.digest.hex() or 'missing'}, that of its {len(batch.items)} trajectories "
            f"{digest.hex()}",
        )
    return None


def quarantine(
    client: Client,
    held: Mapping[str, Any],
    batch: batch_pb2.Batch,
    problem: BadBatch,
    *,
    step: int,
    was_trained: bool,
    num_before: int,
) -> None:
    """Give the batch of `step` back for good; `held` names policy and epoch, `num_before` those before it in a row.

    Raises InternalError where another one would not help.
    """
    said = f"batch {batch.batch_id!r} of step {step} cannot be trained on, {problem.slug}: {problem.detail}"
    if was_trained:
        raise InternalError(
            f"{said}; the step was trained on it, so no other can take its place: what the server's Redis holds is "
            "damaged, restore it from its backup"
        )
    if num_before == _MAX_QUARANTINED:
        raise InternalError(
            f"{said}; so were the {_MAX_QUARANTINED} before it, which are quarantined: server and trainer differ, "
            "see that they are of one release, then start the trainer again"
        )
    request = batch_service_pb2.NackBatchRequest(
        **held,
        step=step,
        reason=problem.slug,
        quarantine=True,
        batch_id=batch.batch_id,
        detail=problem.detail,
    )
    client.call(client.batches.NackBatch, request)


def fetch_bodies(
    client: Client, held: Mapping[str, Any], *, step: int, items: Sequence[batch_pb2.BatchItem]
) -> dict[str, bytes]:
    """Return the payloads of `items` that the server still has, by trajectory."""
    wanted = [item.trajectory_id for item in items]
    while wanted:
        request = batch_service_pb2.FetchBatchRequest(
            **held, step=step, trajectory_ids=wanted, pack_bytes=_PACK_BYTES
        )
        try:
            answers = client.read_all(client.batches.FetchBatch, request, timeout_s=_FETCH_TIMEOUT_S)
            # A server of an earlier release knows no packs.
            return {item.trajectory_id: item.body for one in answers for item in one.trajectories or [one]}
        except NotFoundError as error:
            gone = error.metadata.get("payload_missing")
            if gone not in wanted:
                raise
            wanted.remove(gone)
    return {}


def accepted_payload(item: batch_pb2.BatchItem, body: bytes | None, *, base_version: int) -> Trajectory:
    """Return the payload of an item, None where it did not arrive, if it is what its item says. Raises
    BadTrajectory.
    """
    name = item.trajectory_id
    if body is None:
        raise BadTrajectory(
            "payload_missing", f"{name}: its payload is gone from the server, whose log says why"
        )
    if item.max_version > base_version:
        raise BadTrajectory(
            "future_version",
            f"{name}: sampled from version {item.max_version}, its step starts from {base_version}",
        )
    trajectory, digest = check_body(body, item)
    if item.response_digest not in (0, digest):
        raise BadTrajectory(
            "digest_mismatch",
            f"{name}: CRC-32 of its trainable tokens is {digest:08x}, of what was pushed {item.response_digest:08x}",
        )
    return trajectory
