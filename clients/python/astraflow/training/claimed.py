"""A policy that a trainer of yours has claimed: its batches, and what is said of them.

Invariant: intent is recorded before a batch is handed out, what is handed out is what it says, and `trained` names the
batch that was. Blocking, without torch. Weight versions are published beside it
(`astraflow_weights.tools.whole_model`); examples are in clients/python/examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from astraflow.client import Client
from astraflow.columns import Columns, decode_columns
from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2, run_service_pb2
from astraflow.errors import InvalidArgumentError
from astraflow.recipe.file import parse_recipe
from astraflow.training.accepting import (
    BadBatch,
    accepted_payload,
    bad_batch,
    fetch_bodies,
    group_of,
    quarantine,
)
from astraflow.trajectories import BadTrajectory

__all__ = ["BatchRow", "ClaimedBatch", "ClaimedPolicy"]

_POLL_S = 5


@dataclass(frozen=True)
class BatchRow:
    """One trajectory of a batch."""

    item: batch_pb2.BatchItem
    """Reward, task, role, staleness."""
    columns: Columns
    """Token ids, what is trained, and log-probs of the engine."""


@dataclass(frozen=True)
class ClaimedBatch:
    """The batch of one step; whole groups."""

    bound: batch_pb2.Batch
    rows: tuple[BatchRow, ...]
    """At least one."""
    left_out: tuple[BadTrajectory, ...] = ()
    """What was wrong with payloads; their groups are not among the rows, as ours leaves them out."""


class ClaimedPolicy:
    """Claims in its constructor, which fences every older trainer; its client speaks under this claim from then on.
    Every call raises FencedError once another trainer has claimed. Steps are counted from 1; what is acked `trained`
    and not yet `durable` is handed out again.

        policy = ClaimedPolicy(client, trainer_id="mine")
        batch = policy.next_batch(step=1, base_version=0)
    """

    def __init__(self, client: Client, *, trainer_id: str, run_id: str = "", policy_id: str = "") -> None:
        """The only run of the server, and its only policy, unless named. Raises InvalidArgumentError where there are
        several policies, and what `GetRun` and `ClaimPolicy` answer.
        """
        self._client = client
        run = client.call(client.runs.GetRun, run_service_pb2.GetRunRequest(run_id=run_id)).run
        recipe = parse_recipe(run.recipe_yaml, source=f"recipe of run {run.run_id}").recipe
        if len(recipe.policies) > 1 and policy_id not in recipe.policies:
            raise InvalidArgumentError(
                f"policy {policy_id!r} is none of {', '.join(recipe.policies)}, which the run has; name one"
            )
        self.settings = recipe.policy(policy_id or next(iter(recipe.policies)))
        """What the recipe says of the policy."""
        self.store_uri = run.store_uri
        """Where its versions go."""
        self.run_id = run.run_id
        request = batch_service_pb2.ClaimPolicyRequest(
            run_id=run.run_id,
            policy_id=self.settings.policy_id,
            trainer_id=trainer_id,
            last_step=self.settings.steps,
        )
        claim = client.call(client.batches.ClaimPolicy, request)
        client.session, self.epoch = claim.session, claim.trainer_epoch
        """Under which it publishes."""

    def next_batch(self, *, step: int, base_version: int) -> ClaimedBatch:
        """Wait for the batch of a step that starts from a version, however long that takes.

        One that cannot be trained on is given back with the reason and quarantined, and the next one waited for. Raises
        InternalError after three in a row, and where the step was trained on it.
        """
        request = batch_service_pb2.AcquireBatchRequest(
            **self._held, step=step, base_version=base_version, wait_duration=Duration(seconds=_POLL_S)
        )
        num_quarantined = 0
        while True:
            answer = self._client.call(self._client.batches.AcquireBatch, request, timeout_s=_POLL_S + 10.0)
            if not answer.HasField("batch"):
                continue
            accepted = self._accepted(answer.batch, step=step)
            if isinstance(accepted, ClaimedBatch):
                break
            was_trained = answer.stage > batch_service_pb2.BATCH_STAGE_INTENT
            quarantine(
                self._client,
                self._held,
                answer.batch,
                accepted,
                step=step,
                was_trained=was_trained,
                num_before=num_quarantined,
            )
            num_quarantined += 1
        if answer.stage == batch_service_pb2.BATCH_STAGE_UNSPECIFIED:
            self._ack(answer.batch, batch_service_pb2.BATCH_STAGE_INTENT)
        return accepted

    def _accepted(self, batch: batch_pb2.Batch, *, step: int) -> ClaimedBatch | BadBatch:
        """The batch without groups that have a bad payload, or why none of it can be trained on."""
        if problem := bad_batch(batch, policy_id=self.settings.policy_id, step=step):
            return problem
        bodies = fetch_bodies(self._client, self._held, step=step, items=batch.items)
        rows, problems = dict[str, BatchRow](), dict[tuple[str, str], BadTrajectory]()
        for item in batch.items:
            try:
                body = bodies.get(item.trajectory_id)
                payload = accepted_payload(item, body, base_version=batch.base_version)
                rows[item.trajectory_id] = BatchRow(item, decode_columns(payload))
            except BadTrajectory as bad:
                problems.setdefault(group_of(item), bad)
        left = tuple(row for row in rows.values() if group_of(row.item) not in problems)
        if not left:
            first = next(iter(problems.values()))
            return BadBatch(first.slug, f"none of its groups can be trained on; {first.detail}")
        return ClaimedBatch(batch, left, tuple(problems.values()))

    def trained(self, batch: ClaimedBatch, *, figures: Mapping[str, float] | None = None) -> None:
        """The optimizer step was taken: publish its version next. The server keeps `figures`, such as `reward_mean`,
        `wait_s` and `train_s`, as the policy's series. Idempotent.
        """
        self._ack(batch.bound, batch_service_pb2.BATCH_STAGE_TRAINED, figures=figures)

    def durable(self, step: int) -> None:
        """A later start goes on after this step: the server may release what it needed for it. Idempotent."""
        request = batch_service_pb2.MarkDurableRequest(**self._held, step=step)
        self._client.call(self._client.batches.MarkDurable, request)

    @property
    def _held(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "policy_id": self.settings.policy_id, "trainer_epoch": self.epoch}

    def _ack(
        self,
        batch: batch_pb2.Batch,
        stage: batch_service_pb2.BatchStage.ValueType,
        *,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        request = batch_service_pb2.AckBatchRequest(
            **self._held,
            step=batch.step,
            batch_id=batch.batch_id,
            digest=batch.digest,
            stage=stage,
            metrics=figures,
        )
        self._client.call(self._client.batches.AckBatch, request)
