"""A dataflow server inside the test's own loop over a real Valkey, with a node and a trainer in a few lines.

`World` is the server, its client and a run; `Node` and `Trainer` speak the contract the way the real ones do.
Used by the integration and contract tests of the dataflow server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from google.protobuf.duration_pb2 import Duration

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.columns import Columns, encode_columns
from astraflow.dataflow.v1 import (
    admin_service_pb2,
    batch_pb2,
    batch_service_pb2,
    run_pb2,
    run_service_pb2,
    task_service_pb2,
    trajectory_service_pb2,
    version_pb2,
    version_service_pb2,
)
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.server import Dataflow, RunKeeper
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_kit.serve import GrpcServer

RECIPE = """
run: {{name: {name}, dataset: "{dataset}"}}
policies:
{policies}
dataflow: {{{dataflow}}}
raas: {{{raas}}}
"""
REWARD = "support.dataflow_world:Zero"
POLICY = "  {name}: {{model: {{path: nowhere}}, sampling: {{max_new_tokens: 16}}}}"


class Counting:
    """An endless data set: the task's data is its index."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, index: int) -> object:
        return _task_spec(f"train-{index}")

    def heldout(self, index: int) -> object:
        return _task_spec(f"heldout-{index}")


class Short(Counting):
    """Three training tasks and two held-out ones."""

    def train(self, index: int) -> object:
        return super().train(index) if index < 3 else None

    def heldout(self, index: int) -> object:
        return super().heldout(index) if index < 2 else None


class Unevaluated(Counting):
    """An endless data set without held-out tasks, so all leases are for training."""

    def heldout(self, index: int) -> object:
        return None


class Empty(Counting):
    """No tasks: tests submit their own."""

    def train(self, index: int) -> object:
        return None

    def heldout(self, index: int) -> object:
        return None


class Breaking(Counting):
    """A data set that fails until a test mends it."""

    mended = False

    def train(self, index: int) -> object:
        if not Breaking.mended:
            raise RuntimeError("the file is gone")
        return super().train(index)


class Zero:
    """A reward nobody calls."""

    def __call__(self, task: object, completion: str) -> float:
        return 0.0


def _task_spec(task_id: str) -> object:
    from astraflow.plugins import Message, TaskSpec

    return TaskSpec(task_id=task_id, messages=(Message(role="user", content=task_id),), data={"id": task_id})


def recipe_text(
    *,
    name: str = "run",
    dataset: str = "Empty",
    policies: Sequence[str] = ("solver",),
    raas: Mapping[str, object] | None = None,
    **dataflow: object,
) -> str:
    """A recipe with small groups; `dataflow` and `raas` override single keys."""
    settings = {
        "group_size": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        "lease_ttl_s": 20,
        "max_attempts": 3,
    }
    merged = settings | {"evaluation": "{every_versions: 0, num_samples: 2, final_samples: 2}"} | dataflow
    text = RECIPE.format(
        name=name,
        dataset=dataset if ":" in dataset else f"support.dataflow_world:{dataset}",
        policies="\n".join(POLICY.format(name=policy) for policy in policies),
        dataflow=", ".join(f"{key}: {value}" for key, value in merged.items()),
        raas=", ".join(f"{key}: {value}" for key, value in {"reward": REWARD, **(raas or {})}.items()),
    )
    return parse_recipe(text).yaml_text


@dataclass
class World:
    """A served run."""

    dataflow: Dataflow
    client: AsyncClient
    address: str
    run_id: str = ""

    async def create_run(self, *, store_uri: str = "file:///nowhere", **recipe: object) -> run_pb2.Run:
        """Create a run and work on it from now on."""
        text = recipe_text(**recipe)  # type: ignore[arg-type]
        name = parse_recipe(text).recipe.run.name
        request = run_service_pb2.CreateRunRequest(
            run=run_pb2.Run(run_id=name, recipe_yaml=text, store_uri=store_uri)
        )
        run = (await self.client.call(self.client.runs.CreateRun, request)).run
        self.run_id = run.run_id
        return run

    async def submit(self, *task_ids: str, group_size: int = 0) -> task_service_pb2.SubmitTasksResponse:
        """Submit training tasks."""
        tasks = [task_pb2.Task(task_id=task_id, group_size=group_size) for task_id in task_ids]
        request = task_service_pb2.SubmitTasksRequest(run_id=self.run_id, tasks=tasks)
        return await self.client.call(self.client.tasks.SubmitTasks, request)

    async def node(self, node_id: str = "n1", *, incarnation: int = 1, max_tasks: int = 64) -> Node:
        """Join a node."""
        request = run_service_pb2.JoinRunRequest(
            run_id=self.run_id, node_id=node_id, incarnation=incarnation, max_concurrent_tasks=max_tasks
        )
        await self.client.call(self.client.runs.JoinRun, request)
        return Node(world=self, node_id=node_id, incarnation=incarnation)

    async def trainer(self, policy_id: str = "solver", *, publish_first: bool = True) -> Trainer:
        """Claim a policy, and announce version 0 unless it has one."""
        trainer = Trainer(world=self, policy_id=policy_id)
        claim = await trainer.claim()
        if publish_first and not claim.HasField("version"):
            await trainer.publish(version=0, step=0)
        return trainer

    async def status(self) -> admin_service_pb2.StatusResponse:
        """The run's status."""
        return await self.client.call(
            self.client.admin.Status, admin_service_pb2.StatusRequest(run_id=self.run_id)
        )

    async def is_finished(self) -> bool:
        """Whether the run has ended."""
        return (await self.status()).state == run_pb2.RUN_STATE_FINISHED

    async def finish(self) -> None:
        """Ask the run to finish."""
        await self._update(run_pb2.RUN_STATE_FINISHING)

    async def resume(self) -> None:
        """Continue a run that was finished."""
        await self._update(run_pb2.RUN_STATE_ACTIVE)

    async def _update(self, state: run_pb2.RunState.ValueType) -> None:
        request = run_service_pb2.UpdateRunRequest(run_id=self.run_id, state=state)
        await self.client.call(self.client.runs.UpdateRun, request)


@dataclass
class Node:
    """A node of unary calls."""

    world: World
    node_id: str
    incarnation: int
    serving: dict[str, int] = field(default_factory=dict)

    async def lease(self, count: int = 1, *, wait_s: float = 5.0) -> list[task_pb2.Lease]:
        """Lease tasks."""
        return list((await self.lease_reply(count, wait_s=wait_s)).leases)

    async def lease_reply(
        self, count: int = 1, *, wait_s: float = 0.0
    ) -> task_service_pb2.LeaseTasksResponse:
        """Lease tasks; with the reason when there are none."""
        request = task_service_pb2.LeaseTasksRequest(
            run_id=self.world.run_id,
            node_id=self.node_id,
            incarnation=self.incarnation,
            max_tasks=count,
            wait_duration=seconds(wait_s),
            serving_versions=self.serving,
        )
        client = self.world.client
        return await client.call(client.tasks.LeaseTasks, request, timeout_s=wait_s + 10)

    async def fail(self, lease: task_pb2.Lease, reason: str, *, retryable: bool = True) -> bool:
        """Give a lease back; return whether it was queued again."""
        failure = task_service_pb2.LeaseFailure(lease_id=lease.lease_id, reason=reason, retryable=retryable)
        request = task_service_pb2.FailTaskRequest(
            run_id=self.world.run_id, node_id=self.node_id, failure=failure
        )
        return (await self.world.client.call(self.world.client.tasks.FailTask, request)).requeued

    async def renew(self, *lease_ids: str) -> list[str]:
        """Renew leases; return the lost ones."""
        request = task_service_pb2.RenewLeasesRequest(
            run_id=self.world.run_id, node_id=self.node_id, lease_ids=lease_ids
        )
        return list(
            (await self.world.client.call(self.world.client.tasks.RenewLeases, request)).lost_lease_ids
        )

    async def push(self, episode: trajectory_pb2.Episode) -> trajectory_service_pb2.PushResult:
        """Push one episode."""
        client = self.world.client
        request = trajectory_service_pb2.PushEpisodeRequest(episode=episode)
        return (await client.call(client.trajectories.PushEpisode, request)).result

    def episode(self, lease: task_pb2.Lease, member: int, **changes: object) -> trajectory_pb2.Episode:
        """A good episode for one member of a lease."""
        merged = {
            "run_id": self.world.run_id,
            "task_id": lease.task.task_id,
            "member": member,
            "attempt": lease.attempt,
            "node_id": self.node_id,
        }
        return make_episode(**(merged | changes))  # type: ignore[arg-type]

    async def complete(self, lease: task_pb2.Lease, **changes: object) -> list[str]:
        """Push all missing members of a lease; return the outcomes' names."""
        outcomes = []
        for member in lease.members:
            reward = {"reward": float(member)} if "reward" not in changes else {}
            result = await self.push(self.episode(lease, member, **(reward | changes)))
            outcomes.append(trajectory_service_pb2.Outcome.Name(result.outcome).removeprefix("OUTCOME_"))
        return outcomes


@dataclass
class Trainer:
    """A trainer of one policy."""

    world: World
    policy_id: str
    epoch: int = 0

    async def claim(
        self,
        *,
        trainer_id: str = "test",
        known_epoch: int = 0,
        held_epoch: int = 0,
        only_if_unheld: bool = False,
    ) -> batch_service_pb2.ClaimPolicyResponse:
        """Start a new epoch."""
        request = batch_service_pb2.ClaimPolicyRequest(
            run_id=self.world.run_id,
            policy_id=self.policy_id,
            trainer_id=trainer_id,
            known_epoch=known_epoch,
            held_epoch=held_epoch,
            only_if_unheld=only_if_unheld,
        )
        claim = await self.world.client.call(self.world.client.batches.ClaimPolicy, request)
        self.epoch = claim.trainer_epoch
        return claim

    async def hold(self) -> None:
        """Say that this trainer lives."""
        request = batch_service_pb2.HoldPolicyRequest(
            run_id=self.world.run_id, policy_id=self.policy_id, trainer_epoch=self.epoch
        )
        await self.world.client.call(self.world.client.batches.HoldPolicy, request)

    async def release(self) -> None:
        """Say that this trainer ends."""
        request = batch_service_pb2.ReleasePolicyRequest(
            run_id=self.world.run_id, policy_id=self.policy_id, trainer_epoch=self.epoch
        )
        await self.world.client.call(self.world.client.batches.ReleasePolicy, request)

    async def acquire(
        self, step: int, *, base_version: int = 0, wait_s: float = 5.0
    ) -> batch_service_pb2.AcquireBatchResponse:
        """Acquire the batch of a step."""
        request = batch_service_pb2.AcquireBatchRequest(
            run_id=self.world.run_id,
            policy_id=self.policy_id,
            trainer_epoch=self.epoch,
            step=step,
            base_version=base_version,
            wait_duration=seconds(wait_s),
        )
        client = self.world.client
        return await client.call(client.batches.AcquireBatch, request, timeout_s=wait_s + 10)

    async def fetch(self, step: int, *trajectory_ids: str) -> list[batch_service_pb2.FetchBatchResponse]:
        """Fetch payloads."""
        request = batch_service_pb2.FetchBatchRequest(
            run_id=self.world.run_id,
            policy_id=self.policy_id,
            trainer_epoch=self.epoch,
            step=step,
            trajectory_ids=trajectory_ids,
        )
        client = self.world.client
        return [item async for item in client.stream(client.batches.FetchBatch, request)]

    async def ack(self, batch: batch_pb2.Batch, stage: int, *, digest: bytes | None = None) -> int:
        """Record a stage."""
        request = batch_service_pb2.AckBatchRequest(
            run_id=self.world.run_id,
            policy_id=self.policy_id,
            trainer_epoch=self.epoch,
            step=batch.step,
            batch_id=batch.batch_id,
            digest=batch.digest if digest is None else digest,
            stage=stage,  # type: ignore[arg-type]
        )
        return (await self.world.client.call(self.world.client.batches.AckBatch, request)).stage

    async def nack(self, step: int) -> int:
        """Give a batch back."""
        request = batch_service_pb2.NackBatchRequest(
            run_id=self.world.run_id,
            policy_id=self.policy_id,
            trainer_epoch=self.epoch,
            step=step,
            reason="test",
        )
        return (await self.world.client.call(self.world.client.batches.NackBatch, request)).returned_groups

    async def publish(
        self,
        *,
        version: int,
        step: int,
        content: bytes = b"",
        writer_epoch: int | None = None,
        rollback_of: int | None = None,
    ) -> version_pb2.Version:
        """Announce a version."""
        message = version_pb2.Version(
            policy_id=self.policy_id,
            version=version,
            sequence=version,
            manifest_sha256=(content or b"%d" % version).ljust(32, b"."),
            step=step,
            trainer_epoch=self.epoch if writer_epoch is None else writer_epoch,
            rollback_of=rollback_of,
        )
        request = version_service_pb2.PublishRequest(
            run_id=self.world.run_id, version=message, trainer_epoch=self.epoch
        )
        return (await self.world.client.call(self.world.client.versions.Publish, request)).version

    async def mark_durable(self, step: int) -> int:
        """Mark steps durable; return the released trajectories."""
        request = batch_service_pb2.MarkDurableRequest(
            run_id=self.world.run_id, policy_id=self.policy_id, trainer_epoch=self.epoch, step=step
        )
        return (
            await self.world.client.call(self.world.client.batches.MarkDurable, request)
        ).released_trajectories

    async def train(self, step: int, *, base_version: int) -> batch_pb2.Batch:
        """Acquire, record the intent, train and publish one step."""
        batch = (await self.acquire(step, base_version=base_version)).batch
        await self.ack(batch, batch_service_pb2.BATCH_STAGE_INTENT)
        await self.ack(batch, batch_service_pb2.BATCH_STAGE_TRAINED)
        await self.publish(version=base_version + 1, step=step)
        return batch


def make_trajectory(
    trajectory_id: str,
    *,
    policy_id: str = "solver",
    role: str = "",
    num_prompt: int = 4,
    num_response: int = 4,
    version: int = 0,
    reward: float = 1.0,
) -> trajectory_pb2.TrajectoryItem:
    """A good trajectory: a prompt that is not trained on, and a response that is."""
    num_tokens = num_prompt + num_response
    mask = np.arange(num_tokens) >= num_prompt
    columns = Columns(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=((num_prompt, num_tokens, version),),
    )
    header = trajectory_pb2.TrajectoryHeader(
        trajectory_id=trajectory_id,
        policy_id=policy_id,
        role=role,
        num_tokens=num_tokens,
        num_trainable_tokens=num_response,
        min_version=version,
        max_version=version,
        reward=reward,
        finish_reason="stop",
    )
    body = encode_columns(columns, trajectory_id=trajectory_id)
    body.sampling.temperature = 1.0
    return trajectory_pb2.TrajectoryItem(header=header, body=body.SerializeToString())


def make_episode(
    *,
    run_id: str,
    task_id: str,
    member: int,
    attempt: int = 1,
    node_id: str = "n1",
    episode_id: str = "",
    policies: Sequence[str] = ("solver",),
    reward: float = 1.0,
    version: int | Mapping[str, int] = 0,
    failed: bool = False,
    hedge: bool = False,
    num_response: int = 4,
) -> trajectory_pb2.Episode:
    """A good episode with one trajectory per policy."""
    episode_id = episode_id or f"{task_id}.{member}.{attempt}.{node_id}"
    items = [
        make_trajectory(
            f"{episode_id}.{policy}",
            policy_id=policy,
            reward=reward,
            version=version if isinstance(version, int) else version[policy],
            num_response=num_response,
        )
        for policy in policies
    ]
    return trajectory_pb2.Episode(
        run_id=run_id,
        task_id=task_id,
        episode_id=episode_id,
        member=member,
        attempt=attempt,
        node_id=node_id,
        status=trajectory_pb2.EPISODE_STATUS_FAILED if failed else trajectory_pb2.EPISODE_STATUS_FINISHED,
        trajectories=[] if failed else items,
        hedge=hedge,
    )


@asynccontextmanager
async def served(url: str, folder: Path, **settings: object) -> AsyncIterator[World]:
    """A dataflow server over the Redis at `url`, in this loop."""
    configured = DataflowServerSettings(redis=url, work_dir=folder, **settings)  # type: ignore[arg-type]
    dataflow = Dataflow.assemble(configured)
    keeper = RunKeeper(dataflow)
    server = GrpcServer(dataflow.registrations(), settings=configured, metrics=dataflow.metrics)
    await keeper.start()
    await server.start()
    try:
        async with AsyncClient(server.address, retry=RetryPolicy(total_s=0)) as client:
            yield World(dataflow=dataflow, client=client, address=server.address)
    finally:
        await server.stop(deadline_s=0.2)
        await keeper.stop(deadline_s=1.0)


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float = 20.0) -> None:
    """Wait until a condition holds: for what the server does on its own."""
    deadline_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"still not so after {within_s:g} s"
        await asyncio.sleep(0.02)


def seconds(value: float) -> Duration:
    """A protobuf duration."""
    duration = Duration()
    duration.FromMilliseconds(int(value * 1000))
    return duration
