"""What a trainer accepts of what it is handed: a batch as a whole, and each of its payloads.

Nodes and the server checked all of it when it was pushed, so what is refused here was damaged since, or comes from a
server that has another idea of the contract. Invariant: a batch is judged by itself and by what was asked for alone, so
every rank, and a replay, finds the same. Called by the batch source.
"""

from __future__ import annotations

from dataclasses import dataclass

from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import batch_pb2
from astraflow.plugins import VersionSpan
from astraflow.trajectories import BadTrajectory, batch_digest, check_body
from astraflow_trainer.batches.rows import Group, RowOrigin, TrainingRow


@dataclass(frozen=True, slots=True)
class BadBatch:
    """Why a batch cannot be trained on: a slug, and a sentence with the values."""

    slug: str
    detail: str


def group_of(item: batch_pb2.BatchItem) -> Group:
    """The group of an item."""
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


def accepted_row(item: batch_pb2.BatchItem, body: bytes | None, *, base_version: int) -> TrainingRow:
    """Return the row of an item from its payload, None where that did not arrive. Raises BadTrajectory."""
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
    columns = decode_columns(trajectory)
    return TrainingRow(
        trajectory_id=name,
        origin=RowOrigin(item.task_id, item.role, item.member, item.turn, item.source),
        token_ids=columns.token_ids,
        loss_mask=columns.loss_mask,
        behavior_logprobs=columns.logprobs,
        version_spans=tuple(
            VersionSpan(span.start, span.end, span.version, span.recomputed)
            for span in trajectory.version_spans
        ),
        reward=item.reward,
        temperature=trajectory.sampling.temperature,
        truncated=item.truncated,
    )
