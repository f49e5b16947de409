"""Batches and versions in Redis.

Every call carries the trainer epoch and the function refuses an older one, so a trainer that was replaced can change
nothing. Called by the batch and version services and by the run loop.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from astraflow.dataflow.v1 import batch_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as pb
from astraflow.dataflow.v1.version_pb2 import Pin, Version
from astraflow_dataflow.records import Candidates, Life, Pending, Selection, timestamp
from astraflow_dataflow.rules.failures import kind_of
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import (
    Reply,
    as_bytes,
    as_int,
    as_list,
    as_mapping,
    as_text,
    as_texts,
    flag,
)
from astraflow_dataflow.store.writing import Argument

_MAX_FLOAT32 = float(np.finfo(np.float32).max)

STALE_GROUPS_PER_CALL = 64
OFFERED_GROUPS = 1024
"""Ready groups a selector chooses from at most, or as many as the step needs."""
BoundStep: TypeAlias = pb.AcquireBatchRequest | pb.FetchBatchRequest | pb.AckBatchRequest
"""A request of a trainer about the batch of one step."""


class BatchStore:
    """Binding, acknowledging and releasing of batches."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def claim(
        self,
        run_id: str,
        request: pb.ClaimPolicyRequest,
        *,
        claimer: str,
        incarnation: str,
        lease_s: float,
    ) -> pb.ClaimPolicyResponse:
        """Start a new trainer epoch, above `known_epoch` too. Raises NotFoundError for an unknown policy.

        A claim under another data `incarnation` than the last skips numbers that may have been given and lost.

        Batch lease and data incarnation are left out. With `held_epoch`, raises FencedError when another trainer has a
        newer one; with `only_if_unheld`, PolicyHeldError when a trainer has called within `lease_s`; such a claim does
        not hold the policy. With `accepted_loss` the policy goes on after that step; raises PreconditionError where
        nothing is in doubt. `claimer` is how the trainer is called from now on.
        """
        arguments = (
            request.policy_id,
            claimer,
            request.known_epoch,
            request.held_epoch,
            incarnation,
            int(lease_s * 1000),
            flag(request.only_if_unheld),
            request.last_step,
            request.accepted_loss.identity,
            request.accepted_loss.step,
        )
        reply = as_list(await self._connection.call(Keys(run_id), "claim", *arguments))
        version = as_text(reply[3])
        return pb.ClaimPolicyResponse(
            trainer_epoch=as_int(reply[0]),
            last_finished_step=as_int(reply[1]),
            last_durable_step=as_int(reply[2]),
            version=int(version) if version else None,
            identity=as_text(reply[4]),
        )

    async def hold(self, run_id: str, request: pb.HoldPolicyRequest, *, lease_s: float) -> None:
        """Note that the trainer of this epoch lives, and what it waits for; of one without, only the latter.

        Raises FencedError; PolicyHeldError for epoch 0 where a trainer has called within `lease_s`; NotFoundError.
        """
        progress = repr(request.progress) if request.HasField("progress") else ""
        holder = (request.policy_id, request.trainer_epoch, int(lease_s * 1000))
        arguments = (*holder, request.waiting_for, request.detail, progress)
        await self._connection.call(Keys(run_id), "hold", *arguments)

    async def release_policy(self, run_id: str, policy_id: str, *, epoch: int, doubt: str) -> None:
        """Note that the trainer of this epoch ends, and what it doubts. Raises FencedError, NotFoundError."""
        await self._connection.call(Keys(run_id), "release_policy", policy_id, epoch, doubt)

    async def acquire(
        self,
        run_id: str,
        request: pb.AcquireBatchRequest,
        *,
        max_behind: int,
        lease_s: float,
        wait_s: float,
        selection: Selection | None = None,
    ) -> pb.AcquireBatchResponse | Candidates | None:
        """Return the step's batch, of which only the id is filled in, binding one when it can; else why there is none.

        With a `selection`, what it says: an offer of ready groups, a wait, or exactly the chosen groups, all or none.
        None asks for another call at once: stale groups were dropped. Raises FencedError, NotFoundError,
        InvalidArgumentError.
        """
        lease_ms, wait_ms = int(lease_s * 1000), int(wait_s * 1000)
        arguments: tuple[Argument, ...] = (
            *_step_of(request),
            request.base_version,
            max_behind,
            STALE_GROUPS_PER_CALL,
            lease_ms,
            wait_ms,
            flag(request.read_ahead),
        )
        if selection is not None:
            arguments += (selection.mode, OFFERED_GROUPS, selection.detail, *selection.chosen)
        kind, *rest = as_list(await self._connection.call(Keys(run_id), "acquire", *arguments))
        if kind == b"more":
            return None
        if kind == b"offer":
            return _candidates(rest)
        if kind == b"bound":
            bound = batch_pb2.Batch(batch_id=as_text(rest[0]))
            return pb.AcquireBatchResponse(batch=bound, stage=_stage(rest[1]))
        return pb.AcquireBatchResponse(waiting_for=as_text(rest[0]))

    async def batch(self, run_id: str, request: BoundStep) -> batch_pb2.Batch:
        """Return the batch bound to a step: as it was sealed, or its groups' items in binding order without a digest
        when nobody has sealed it yet. Raises FencedError, NotFoundError.
        """
        reply = as_list(await self._connection.call(Keys(run_id), "batch", *_step_of(request)))
        batch_id, base_version, manifest, *groups = reply
        if manifest:
            return batch_pb2.Batch.FromString(as_bytes(manifest))
        batch = batch_pb2.Batch(
            batch_id=as_text(batch_id),
            policy_id=request.policy_id,
            step=request.step,
            base_version=as_int(base_version),
        )
        for group in groups:
            use, items = as_list(group) if isinstance(group, list) else (0, group)
            added = batch_pb2.Batch.FromString(as_bytes(items)).items
            for item in added:
                item.use = as_int(use)
            batch.items.extend(added)
        return batch

    async def seal(self, run_id: str, batch: batch_pb2.Batch, *, staleness: Mapping[int, int]) -> None:
        """Keep the manifest of a bound batch; the first one stays."""
        arguments = (batch.policy_id, batch.batch_id, batch.SerializeToString(), batch.digest)
        pairs: list[Argument] = [part for item in staleness.items() for part in item]
        await self._connection.call(Keys(run_id), "seal", *arguments, *pairs)

    async def ack(
        self, run_id: str, request: pb.AckBatchRequest, *, priorities: Mapping[str, float] | None = None
    ) -> pb.BatchStage.ValueType:
        """Record a stage and return the one recorded now; `priorities` are those of the groups for their replay.

        Raises FencedError, ConflictError, NotFoundError.
        """
        named = _figures(request.metrics)
        arguments = (*_step_of(request), request.batch_id, request.digest, stage_name(request.stage), *named)
        pairs: list[Argument] = [
            part for gid, value in (priorities or {}).items() for part in (gid, repr(value))
        ]
        return _stage(await self._connection.call(Keys(run_id), "ack", *arguments, *pairs))

    async def nack(self, run_id: str, request: pb.NackBatchRequest) -> tuple[pb.NackBatchResponse, int]:
        """Return the step's groups to the ready set, or quarantine them; and say how many batches in a row failed in
        training.

        Raises FencedError, PreconditionError once it was trained on.
        """
        why = (request.reason or "unnamed") if request.quarantine else ""
        kind = kind_of(why, request.detail)
        arguments = (*_step_of(request), request.batch_id, why, request.detail, kind)
        reply = await self._connection.call(Keys(run_id), "nack", *arguments)
        returned, dropped, failed = map(as_int, as_list(reply))
        return pb.NackBatchResponse(returned_groups=returned, quarantined_trajectories=dropped), failed

    async def void(
        self, run_id: str, policy_id: str, *, step: int, batch_id: str, discard: bool, reason: str
    ) -> tuple[int, int]:
        """Take a batch away from its trainer. Returns (groups returned, trajectories dropped).

        Raises NotFoundError for another batch, PreconditionError once it was trained on.
        """
        action = "discard" if discard else "return"
        reply = await self._connection.call(Keys(run_id), "void", policy_id, step, batch_id, action, reason)
        returned, dropped = as_list(reply)
        return as_int(returned), as_int(dropped)

    async def renew(self, run_id: str, request: pb.RenewBatchRequest, *, lease_s: float) -> None:
        """Extend the batch's lease. Raises FencedError, NotFoundError."""
        arguments = (*_step_of(request), int(lease_s * 1000))
        await self._connection.call(Keys(run_id), "renew_batch", *arguments)

    async def mark_durable(self, run_id: str, request: pb.MarkDurableRequest) -> int:
        """Note the last durable step. Raises FencedError, InvalidArgumentError for an unfinished step."""
        return as_int(await self._connection.call(Keys(run_id), "mark_durable", *_step_of(request)))

    async def release_durable(self, run_id: str, policy_id: str) -> int:
        """Free retained steps that a durable checkpoint covers. Returns the trajectories released."""
        keys, released = Keys(run_id), 0
        for step in as_list(await self._connection.call(keys, "releasable", policy_id)):
            released += as_int(await self._connection.call(keys, "release", policy_id, as_text(step)))
        return released

    async def pending(self, run_id: str) -> Pending:
        """Return what in a run only time changes. Raises NotFoundError."""
        state, num_open, late, next_ms = as_list(await self._connection.call(Keys(run_id), "pending"))
        return Pending(
            life=Life(as_text(state)),
            num_open=as_int(num_open),
            late_batches=frozenset(as_texts(late)),
            next_late_s=as_int(next_ms) / 1000 if next_ms != b"" else None,
        )


class VersionStore:
    """Announced versions."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def publish(
        self,
        run_id: str,
        *,
        version: Version,
        epoch: int,
        num_unreadable_before: int,
    ) -> Version:
        """Announce a version once. Raises FencedError, ConflictError, VersionGapError."""
        body = Version()
        body.CopyFrom(version)
        body.ClearField("publish_time")
        arguments = (
            version.policy_id,
            version.version,
            version.manifest_sha256.hex(),
            version.step,
            epoch,
            version.trainer_epoch,
            flag(version.HasField("rollback_of")),
            num_unreadable_before,
            body.SerializeToString(deterministic=True),
        )
        publish_ms, stored = as_list(await self._connection.call(Keys(run_id), "publish", *arguments))
        return _version(as_bytes(stored), as_int(publish_ms))

    async def announce_snapshot(self, run_id: str, version: Version) -> None:
        """Announce the next draw of a snapshot policy; one that is announced already changes nothing."""
        body = Version()
        body.CopyFrom(version)
        body.ClearField("publish_time")
        text = body.SerializeToString(deterministic=True)
        sha = version.manifest_sha256.hex()
        arguments = (version.policy_id, version.version, sha, text)
        await self._connection.call(Keys(run_id), "announce_snapshot", *arguments)

    async def rate(self, run_id: str, policy_id: str, results: Sequence[tuple[int, float]]) -> None:
        """Change the ratings of a snapshot policy by (version it played, score of the trained policy) of episodes."""
        arguments = [part for version, score in results for part in (version, repr(score))]
        await self._connection.call(Keys(run_id), "rate", policy_id, *arguments)

    async def ratings(self, run_id: str, policy_id: str) -> dict[int | None, tuple[float, int]]:
        """Return rating and episodes of each version that was rated; None stands for the trained policy."""
        stored = as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of("ratings", policy_id)))
        return {
            None if name == "trained" else int(name): (float(value), int(stored[f"episodes {name}"]))
            for name, value in stored.items()
            if not name.startswith("episodes ")
        }

    async def newest(self, run_id: str, policy_id: str) -> int | None:
        """Return the newest announced number, or None before the first."""
        reply = as_text(await self._connection.raw("HGET", Keys(run_id).of("policy", policy_id), "version"))
        return int(reply) if reply else None

    async def several(self, run_id: str, policy_id: str, numbers: Sequence[int]) -> list[Version]:
        """Return announced versions in the order asked, leaving out unknown ones."""
        if not numbers:
            return []
        reply = as_list(await self._connection.raw("HMGET", Keys(run_id).of("versions", policy_id), *numbers))
        return [_stored_version(item) for item in reply if isinstance(item, bytes)]

    async def of_steps(self, run_id: str, policy_id: str, steps: Sequence[int]) -> dict[int, int]:
        """Return the version published from each step that has one; of several, the newest."""
        if not steps:
            return {}
        key = Keys(run_id).of("version_steps", policy_id)
        reply = as_list(await self._connection.raw("HMGET", key, *steps))
        return {
            step: int(as_text(item).partition(" ")[0])
            for step, item in zip(steps, reply, strict=True)
            if item is not None
        }

    async def pin(self, run_id: str, policy_id: str, *, version: int, reason: str) -> Pin:
        """Keep a version. Raises NotFoundError for one that is not announced, PreconditionError for too many pins."""
        pin_ms = as_text(await self._connection.call(Keys(run_id), "pin", policy_id, version, reason))
        return Pin(version=version, reason=reason, pin_time=timestamp(int(pin_ms)))

    async def unpin(self, run_id: str, policy_id: str, *, version: int) -> bool:
        """Remove a pin. Returns whether there was one."""
        return as_int(await self._connection.call(Keys(run_id), "unpin", policy_id, version)) == 1

    async def pins(self, run_id: str, policy_id: str) -> list[Pin]:
        """Return the pins, newest version first."""
        stored = as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of("pins", policy_id)))
        return [_pin(version, stored[version]) for version in sorted(stored, key=int, reverse=True)]


def _step_of(
    request: BoundStep | pb.NackBatchRequest | pb.RenewBatchRequest | pb.MarkDurableRequest,
) -> tuple[Argument, ...]:
    return request.policy_id, request.trainer_epoch, request.step


def _figures(metrics: Mapping[str, float]) -> tuple[str, bytes]:
    """Names, a line each, and values of those that a binary32 holds, as `ack` keeps them."""
    kept = sorted((name, value) for name, value in metrics.items() if abs(value) <= _MAX_FLOAT32)
    values = np.array([value for _, value in kept], dtype="<f4")
    return "\n".join(name for name, _ in kept), values.tobytes()


def _candidates(fields: list[Reply]) -> Candidates:
    groups = [as_list(group) for group in fields[3:]]
    return Candidates(
        outstanding=as_int(fields[0]),
        more_come=as_int(fields[1]) == 1,
        lacked_s=as_int(fields[2]) / 1000,
        groups=tuple((as_text(gid), float(as_text(score)), as_bytes(items)) for gid, score, items in groups),
    )


def stage_name(stage: pb.BatchStage.ValueType) -> str:
    """Return a stage as it is stored, counted and logged: `intent`, `trained` or `skipped`."""
    return pb.BatchStage.Name(stage).removeprefix("BATCH_STAGE_").lower()


def _stage(stored: Reply) -> pb.BatchStage.ValueType:
    return pb.BatchStage.Value(f"BATCH_STAGE_{as_text(stored).upper() or 'UNSPECIFIED'}")


def _stored_version(text: bytes) -> Version:
    publish_ms, _, body = text.split(b" ", 2)
    return _version(body, int(publish_ms))


def _version(body: bytes, publish_ms: int) -> Version:
    version = Version.FromString(body)
    version.publish_time.CopyFrom(timestamp(publish_ms))
    return version


def _pin(version: str, stored: bytes) -> Pin:
    pin_ms, _, reason = stored.decode().partition(" ")
    return Pin(version=int(version), reason=reason, pin_time=timestamp(int(pin_ms)))
