"""A node and a trainer in a few lines: they speak the contract as fast as it answers.

Invariant: every push is answered ACCEPTED, and every batch is complete, or the measurement fails: nothing is fast
because it was refused. Used by the measurements of this room.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import duration_pb2

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import batch_pb2, run_pb2, version_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.rollout.v1 import task_pb2
from astraflow_bench.dataflow.workload import NODE, POLICY, Episodes, recipe_text

_SUBMITTED_AT_ONCE, _LEASED_AT_ONCE = 1000, 256
_PATIENCE_S = 60.0
_PACK_BYTES = 2**20
"""As our trainer asks for."""


@dataclass
class Driver:
    """One run through one server."""

    client: AsyncClient
    run_id: str
    group_size: int
    groups_per_step: int
    epoch: int = 0
    step: int = 0
    sessions: dict[str, str] = field(default_factory=dict)
    """Credential of each node, and of the trainer of `POLICY`."""

    @classmethod
    async def create(
        cls,
        client: AsyncClient,
        run_id: str = "bench",
        *,
        group_size: int = 8,
        groups_per_step: int = 64,
    ) -> Driver:
        """A new run with version 0, one node and its trainer."""
        text = recipe_text(run_id, group_size=group_size, groups_per_step=groups_per_step)
        run = run_pb2.Run(run_id=run_id, recipe_yaml=text, store_uri="file:///nowhere")
        await client.call(client.runs.CreateRun, runs.CreateRunRequest(run=run), timeout_s=_PATIENCE_S)
        driver = cls(client=client, run_id=run_id, group_size=group_size, groups_per_step=groups_per_step)
        claim = batches.ClaimPolicyRequest(run_id=run_id, policy_id=POLICY, trainer_id="bench")
        claimed = await client.call(client.batches.ClaimPolicy, claim)
        driver.sessions[POLICY], driver.epoch = claimed.session, claimed.trainer_epoch
        await driver.publish(0)
        await driver.join(NODE)
        return driver

    async def join(self, node_id: str) -> None:
        """Join a node."""
        request = runs.JoinRunRequest(run_id=self.run_id, node_id=node_id, max_concurrent_tasks=100_000)
        self.sessions[node_id] = (await self.client.call(self.client.runs.JoinRun, request)).session

    def node(self, name: str = NODE) -> AsyncClient:
        """The client as a node."""
        client = copy(self.client)
        client.session = self.sessions[name]
        return client

    @property
    def trainer(self) -> AsyncClient:
        """The client under the trainer's claim."""
        return self.node(POLICY)

    async def submit(self, count: int, *, prefix: str) -> None:
        """Submit tasks."""
        for first in range(0, count, _SUBMITTED_AT_ONCE):
            named = [
                task_pb2.Task(task_id=f"{prefix}{n}")
                for n in range(first, min(first + _SUBMITTED_AT_ONCE, count))
            ]
            request = tasks.SubmitTasksRequest(run_id=self.run_id, tasks=named)
            await self.client.call(self.client.tasks.SubmitTasks, request, timeout_s=_PATIENCE_S)

    async def lease(self, count: int, *, node_id: str = NODE) -> list[task_pb2.Lease]:
        """Lease this many tasks; waits for them. Raises RuntimeError when no more come."""
        leases: list[task_pb2.Lease] = []
        newest_s = time.monotonic()
        while len(leases) < count:
            request = tasks.LeaseTasksRequest(
                max_tasks=min(_LEASED_AT_ONCE, count - len(leases)),
                wait_duration=duration_pb2.Duration(seconds=2),
            )
            node = self.node(node_id)
            reply = await node.call(node.tasks.LeaseTasks, request, timeout_s=_PATIENCE_S)
            leases += reply.leases
            if reply.leases:
                newest_s = time.monotonic()
            if time.monotonic() > newest_s + _PATIENCE_S:
                raise RuntimeError(f"{len(leases)} of {count} tasks leased; waits for {reply.waiting_for}")
        return leases

    async def leased(self, count: int, *, prefix: str) -> list[task_pb2.Lease]:
        """Submit and lease."""
        await self.submit(count, prefix=prefix)
        return await self.lease(count)

    async def push(
        self, leases: Sequence[task_pb2.Lease], episodes: Episodes, *, members: int = 0, packed: bool = False
    ) -> int:
        """Push all members of these tasks (the first `members` if given) on one stream, each task's in one message
        where they are `packed`; return how many.
        """
        requests = self._requests(leases, episodes, members or self.group_size, packed=packed)
        accepted, node = 0, self.node()
        async for response in node.open(node.trajectories.Push, requests):
            for result in response.results:
                if result.outcome != pushes.OUTCOME_ACCEPTED:
                    raise RuntimeError(f"a push was answered {result}")
                accepted += 1
        return accepted

    async def _requests(
        self, leases: Sequence[task_pb2.Lease], episodes: Episodes, members: int, *, packed: bool
    ) -> AsyncIterator[pushes.PushRequest]:
        sequence = 0
        for lease in leases:
            group = list(episodes.of(lease, group_size=members))
            for some in [group] if packed else [[episode] for episode in group]:
                sequence += 1
                yield pushes.PushRequest(sequence=sequence, episodes=some)

    async def acquire(self) -> batch_pb2.Batch:
        """The batch of the next step."""
        self.step += 1
        request = batches.AcquireBatchRequest(
            **self._trainer(),
            step=self.step,
            base_version=self.step - 1,
            wait_duration=duration_pb2.Duration(seconds=30),
        )
        reply = await self.trainer.call(self.trainer.batches.AcquireBatch, request, timeout_s=_PATIENCE_S)
        if len(reply.batch.items) != self.group_size * self.groups_per_step:
            raise RuntimeError(f"no whole batch for step {self.step}; waits for {reply.waiting_for}")
        return reply.batch

    async def fetch(self) -> int:
        """Fetch all payloads of the batch; return their bytes."""
        request = batches.FetchBatchRequest(**self._trainer(), step=self.step, pack_bytes=_PACK_BYTES)
        stream = self.trainer.stream(self.trainer.batches.FetchBatch, request, timeout_s=_PATIENCE_S)
        return sum([len(item.body) async for response in stream for item in response.trajectories])

    async def finish(self, batch: batch_pb2.Batch) -> None:
        """Ack, publish and release the step."""
        for stage in (batches.BATCH_STAGE_INTENT, batches.BATCH_STAGE_TRAINED):
            request = batches.AckBatchRequest(
                **self._trainer(), step=self.step, batch_id=batch.batch_id, digest=batch.digest, stage=stage
            )
            await self.trainer.call(self.trainer.batches.AckBatch, request)
        await self.publish(self.step)
        durable = batches.MarkDurableRequest(**self._trainer(), step=self.step)
        await self.trainer.call(self.trainer.batches.MarkDurable, durable, timeout_s=_PATIENCE_S)

    async def publish(self, version: int) -> None:
        """Announce the version of a step."""
        announced = version_pb2.Version(
            policy_id=POLICY,
            version=version,
            sequence=version,
            manifest_sha256=(b"%d" % version).ljust(32, b"."),
            step=version,
            trainer_epoch=self.epoch,
        )
        request = versions.PublishRequest(run_id=self.run_id, version=announced, trainer_epoch=self.epoch)
        await self.trainer.call(self.trainer.versions.Publish, request)

    def _trainer(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "policy_id": POLICY, "trainer_epoch": self.epoch}
