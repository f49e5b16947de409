"""A dataflow server inside the test's own loop over a real Valkey, with a node and a trainer in a few lines.

`World` is the server, its client and a run; `Node` and `Trainer` speak the contract the way the real ones do.
Used by the integration and contract tests of the dataflow server.
"""

from __future__ import annotations

import asyncio
import copy
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from astraflow import plugins
from astraflow.client import DEFAULT_TIMEOUT_S, AsyncClient, RetryPolicy, typed_stream
from astraflow.columns import Columns, encode_columns
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_pb2, run_pb2, version_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as task_pb
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import UnavailableError
from astraflow.plugins import TaskSpec
from astraflow.recipe.file import CodeFile, bundle_digest, parse_recipe
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.server import Dataflow, RunKeeper
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_kit.identity import sealing
from astraflow_kit.serve import GrpcServer

RECIPE = """
run: {{name: {name}, dataset: "{dataset}"}}
policies:
{policies}
roles: {{{roles}}}
dataflow: {{{dataflow}}}
raas: {{{raas}}}
"""
Result = TypeVar("Result")
Reply = TypeVar("Reply", bound=Message)
ATTRIBUTES = {
    "AdminService": "admin",
    "BatchService": "batches",
    "EvaluationService": "evaluations",
    "RunService": "runs",
    "SampleService": "samples",
    "TaskService": "tasks",
    "TrajectoryService": "trajectories",
    "VersionService": "versions",
}
"""The client's attribute of each service of the dataflow server."""
POLICY = "  {name}: {{model: {{path: nowhere}}, sampling: {{max_new_tokens: 16}}}}"


class Counting:
    """An endless data set: the task's data is its index."""

    num_train = num_heldout = math.inf

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, index: int) -> TaskSpec | None:
        return _task_spec(f"train-{index}") if index < self.num_train else None

    def heldout(self, index: int) -> TaskSpec | None:
        return _task_spec(f"heldout-{index}") if index < self.num_heldout else None


class Short(Counting):
    """Three training tasks and two held-out ones."""

    num_train, num_heldout = 3, 2


class Unevaluated(Counting):
    """An endless data set without held-out tasks, so all leases are for training."""

    num_heldout = 0


class Empty(Unevaluated):
    """No tasks: tests submit their own."""

    num_train = 0


class Zero:
    """A reward nobody calls."""

    def __call__(self, task: object, completion: str) -> float:
        return 0.0


def _task_spec(task_id: str) -> TaskSpec:
    message = plugins.Message(role="user", content=task_id)
    return TaskSpec(task_id=task_id, messages=(message,), data={"id": task_id})


def recipe_text(
    *,
    name: str = "run",
    dataset: str = "Empty",
    policies: Sequence[str] = ("solver",),
    roles: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    raas: Mapping[str, object] | None = None,
    **dataflow: object,
) -> str:
    """A recipe with small groups; `dataflow`, `raas` and `overrides` change single keys."""
    sizes = {"group_size": 2, "groups_per_step": 2, "max_staleness": 1, "lease_ttl_s": 20, "max_attempts": 3}
    merged = sizes | {"evaluation": "{every_versions: 0, num_samples: 2, final_samples: 2}"} | dataflow
    work = {"reward": f"{__name__}:Zero", **(raas or {})}
    text = RECIPE.format(
        name=name,
        dataset=dataset if ":" in dataset else f"{__name__}:{dataset}",
        policies="\n".join(POLICY.format(name=policy) for policy in policies),
        roles=_flow(roles or {}),
        dataflow=_flow(merged),
        raas=_flow(work),
    )
    return parse_recipe(text, overrides=overrides).yaml_text


def _flow(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in mapping.items())


def bundle_of(source: str) -> run_pb2.CodeBundle:
    """The code of a recipe whose only file is `recipe.py`."""
    file = CodeFile("recipe.py", source.encode())
    files = [run_pb2.CodeFile(path=file.path, content=file.content)]
    return run_pb2.CodeBundle(files=files, sha256=bundle_digest([file]))


@dataclass
class World:
    """A served run."""

    dataflow: Dataflow
    client: AsyncClient
    address: str
    run_id: str = ""
    nodes: dict[str, Node] = field(default_factory=dict)
    """The newest of each name."""
    trainers: dict[str, Trainer] = field(default_factory=dict)
    """The newest of each policy."""

    def speaking(self, credential: str) -> AsyncClient:
        """The client of whoever has this credential."""
        client = copy.copy(self.client)
        client.session = credential
        return client

    async def ask(
        self, reply: type[Reply], *, timeout_s: float = DEFAULT_TIMEOUT_S, as_: str = "", **fields: Any
    ) -> Reply:
        """Call the rpc with this reply; `fields` are those of its request, which is about the run if it can be; `as_`
        is the credential of who asks.
        """
        name = reply.DESCRIPTOR.name.removesuffix("Response")
        request = getattr(sys.modules[reply.__module__], f"{name}Request")
        (service,) = reply.DESCRIPTOR.file.services_by_name
        rpc = getattr(getattr(self.client, ATTRIBUTES[service]), name)
        if "run_id" in request.DESCRIPTOR.fields_by_name:
            fields = {"run_id": self.run_id} | fields
        answer: Reply = await self.speaking(as_).call(rpc, request(**fields), timeout_s=timeout_s)
        return answer

    async def create_run(self, *, store_uri: str = "file:///nowhere", **recipe: object) -> run_pb2.Run:
        """Create a run and work on it from now on."""
        text = recipe_text(**recipe)  # type: ignore[arg-type]
        self.run_id = parse_recipe(text).recipe.run.name
        run = run_pb2.Run(run_id=self.run_id, recipe_yaml=text, store_uri=store_uri)
        return (await self.ask(runs.CreateRunResponse, run=run)).run

    async def started(self, *task_ids: str, **recipe: object) -> tuple[Trainer, Node]:
        """A new run with version 0, its trainer and a node, and these tasks."""
        await self.create_run(**recipe)  # type: ignore[arg-type]
        trainer, node = await self.trainer(), await self.node()
        if task_ids:
            await self.submit(*task_ids)
        return trainer, node

    async def bound(self, *, groups: int = 2, **recipe: object) -> tuple[Trainer, Node, batch_pb2.Batch]:
        """A new run that finished `groups` groups, and whose trainer holds the batch of step 1."""
        trainer, node = await self.started(**({"dataset": "Counting"} | recipe))
        await node.make_ready(groups)
        return trainer, node, (await trainer.acquire(1)).batch

    async def submit(self, *task_ids: str, group_size: int = 0) -> task_pb.SubmitTasksResponse:
        """Submit training tasks."""
        tasks = [task_pb2.Task(task_id=task_id, group_size=group_size) for task_id in task_ids]
        return await self.ask(task_pb.SubmitTasksResponse, tasks=tasks)

    async def join(self, node_id: str, **facts: Any) -> runs.JoinRunResponse:
        """Join a node; one that is known has restarted, and shows its credential. `facts` are fields of the request."""
        shown = self.nodes[node_id].credential if node_id in self.nodes else ""
        joined = await self.ask(runs.JoinRunResponse, as_=shown, node_id=node_id, **facts)
        self.nodes[node_id] = Node(world=self, node_id=node_id, credential=joined.session)
        return joined

    async def node(self, node_id: str = "n1", **facts: Any) -> Node:
        """Join a node."""
        await self.join(node_id, **{"max_concurrent_tasks": 64} | facts)
        return self.nodes[node_id]

    async def trainer(self, policy_id: str = "solver", *, publish_first: bool = True) -> Trainer:
        """Claim a policy, and announce version 0 unless it has one."""
        trainer = self.trainers[policy_id] = Trainer(world=self, policy_id=policy_id)
        claim = await trainer.claim()
        if publish_first and not claim.HasField("version"):
            await trainer.publish(version=0, step=0)
        return trainer

    async def status(self) -> admin.StatusResponse:
        """The run's status."""
        return await self.ask(admin.StatusResponse)

    async def why(self, task_id: str = "") -> admin.WhyResponse:
        """Why the run, or a task, waits."""
        return await self.ask(admin.WhyResponse, task_id=task_id)

    async def waits(self) -> dict[str, admin.Wait]:
        """What waits now, by reason."""
        return {wait.reason: wait for wait in (await self.status()).waits}

    async def dead_letters(self, **request: Any) -> admin.ListDeadLettersResponse:
        """Tasks that failed for good; `request` are fields of the request."""
        return await self.ask(admin.ListDeadLettersResponse, **request)

    async def requeue(self, *letter_ids: str) -> tuple[int, int, int]:
        """Requeue dead letters, all by default; (requeued, unknown, kept)."""
        reply = await self.ask(admin.RequeueDeadLettersResponse, dead_letter_ids=letter_ids)
        return reply.requeued, reply.unknown, reply.kept

    async def void(self, batch: batch_pb2.Batch, action: int, reason: str = "bad data") -> tuple[int, int]:
        """Void a batch; (groups returned, trajectories dropped)."""
        named: dict[str, Any] = {"policy_id": batch.policy_id, "step": batch.step, "batch_id": batch.batch_id}
        reply = await self.ask(batches.VoidBatchResponse, **named, action=action, reason=reason)
        return reply.returned_groups, reply.dropped_trajectories

    async def has_account(self, **expected: object) -> None:
        """Assert that trajectories and credit balance, and that these are the figures; `dropped` as a mapping."""
        status = await self.status()
        account = status.trajectories
        assert not any(policy.credit_error for policy in status.policies), status.policies
        found = {name: getattr(account, name) for name in expected}
        if "dropped" in found:
            found["dropped"] = dict(account.dropped)
        assert (found, account.conservation_error) == (expected, 0), account

    async def until(
        self, holds: Callable[[admin.StatusResponse], bool], *, within_s: float = 60.0
    ) -> admin.StatusResponse:
        """The status as soon as this holds of it: for what the server, or a node, does on its own."""
        deadline_s, seen = time.monotonic() + within_s, None
        while seen is None or not holds(seen):
            assert time.monotonic() < deadline_s, f"still not so after {within_s:g} s; last status:\n{seen}"
            with suppress(UnavailableError):  # Redis is being restarted
                seen = await self.status()
            await asyncio.sleep(0.02)
        return seen

    async def serves(self, version: int) -> None:
        """Wait until a node says that it serves this version of the policy `solver`."""
        served = {"solver": version}
        await self.until(lambda now: any(dict(node.serving_versions) == served for node in now.nodes))

    async def is_finished(self) -> bool:
        """Whether the run has ended."""
        return (await self.status()).state == run_pb2.RUN_STATE_FINISHED

    async def finish(self) -> None:
        """Ask the run to finish."""
        await self.ask(runs.UpdateRunResponse, state=run_pb2.RUN_STATE_FINISHING)

    async def resume(self) -> None:
        """Continue a run that was finished."""
        await self.ask(runs.UpdateRunResponse, state=run_pb2.RUN_STATE_ACTIVE)


@dataclass
class Node:
    """A node of unary calls."""

    world: World
    node_id: str
    credential: str = field(repr=False)
    serving: dict[str, int] = field(default_factory=dict)

    @property
    def session(self) -> sealing.Session:
        """What its credential says."""
        session = sealing.claimed_session(self.credential)
        assert session is not None
        return session

    async def ask(self, reply: type[Reply], *, timeout_s: float = DEFAULT_TIMEOUT_S, **fields: Any) -> Reply:
        """Call an rpc as this node."""
        return await self.world.ask(reply, timeout_s=timeout_s, as_=self.credential, **fields)

    async def report(self, *, connected_ms: int, **said: Any) -> str:
        """Note a sign of life of its session, as its server does."""
        return await self.world.dataflow.store.nodes.report(self.session, connected_ms=connected_ms, **said)

    async def lease(self, count: int = 1, *, wait_s: float = 5.0) -> list[task_pb2.Lease]:
        """Lease tasks."""
        return list((await self.lease_reply(count, wait_s=wait_s)).leases)

    async def lease_reply(self, count: int = 1, *, wait_s: float = 0.0) -> task_pb.LeaseTasksResponse:
        """Lease tasks; with the reason when there are none."""
        return await self.ask(
            task_pb.LeaseTasksResponse,
            max_tasks=count,
            wait_duration=timedelta(seconds=wait_s),
            serving_versions=self.serving,
            timeout_s=wait_s + 10,
        )

    async def fail(
        self, lease: task_pb2.Lease, reason: str, *, retryable: bool = True, detail: str = ""
    ) -> bool:
        """Give a lease back; return whether it was queued again."""
        failure = task_pb.LeaseFailure(
            lease_id=lease.lease_id, reason=reason, retryable=retryable, detail=detail
        )
        reply = await self.ask(task_pb.FailTaskResponse, failure=failure)
        return reply.requeued

    async def renew(self, *lease_ids: str) -> list[str]:
        """Renew leases, by their ids or by `TASK#ATTEMPT`; return the lost ones, likewise."""
        given = {self.sealed(name): name for name in lease_ids}
        reply = await self.ask(task_pb.RenewLeasesResponse, lease_ids=given)
        return [given[lease_id] for lease_id in reply.lost_lease_ids]

    async def push(self, episode: trajectory_pb2.Episode) -> pushes.PushResult:
        """Push one episode."""
        return (await self.push_reply(episode)).result

    async def push_reply(self, episode: trajectory_pb2.Episode) -> pushes.PushEpisodeResponse:
        """Push one episode; with the watermark. One that names no lease is pushed as if it had been leased."""
        self.lease_all([episode])
        return await self.ask(pushes.PushEpisodeResponse, episode=episode, timeout_s=60)

    async def pack(self, *episodes: trajectory_pb2.Episode) -> list[pushes.PushResult]:
        """Push several episodes in one message; what became of each. Leases as with `push_reply`."""
        self.lease_all(episodes)
        call = self.world.speaking(self.credential).open(self.world.client.trajectories.Push)
        await call.write(pushes.PushRequest(sequence=1, episodes=episodes))
        return list((await anext(typed_stream(call))).results)

    async def outcome(self, episode: trajectory_pb2.Episode) -> str:
        """Push one episode; the outcome's name."""
        return outcome_name(await self.push(episode))

    def episode(self, lease: task_pb2.Lease, member: int, **changes: object) -> trajectory_pb2.Episode:
        """A good episode for one member of a lease; another attempt or copy in `changes` is as if it were leased."""
        merged = {
            "run_id": self.world.run_id,
            "task_id": lease.task.task_id,
            "member": member,
            "attempt": lease.attempt,
            "hedge": lease.hedge,
            "node_id": self.node_id,
            "lease_id": lease.lease_id,
        }
        if changes.keys() & {"task_id", "attempt", "hedge"} and "lease_id" not in changes:
            merged |= changes
            merged["lease_id"] = self.lease_id(merged["task_id"], merged["attempt"], hedge=merged["hedge"])
        return make_episode(**(merged | changes))  # type: ignore[arg-type]

    def lease_all(self, episodes: Iterable[trajectory_pb2.Episode]) -> None:
        """Let those that name no lease be as if they had been leased."""
        for one in episodes:
            one.lease_id = one.lease_id or self.lease_id(one.task_id, one.attempt, hedge=one.hedge)

    def lease_id(self, task_id: object, attempt: object = 1, *, hedge: object = False) -> str:
        """The id of a lease of this node, as its server would give it."""
        return self.sealed(f"{task_id}#{attempt}{'-h' if hedge else ''}")

    def sealed(self, name: str) -> str:
        """The id of a lease of this node by its name `TASK#ATTEMPT`; an id is left as it is."""
        if not re.fullmatch(r".*#\d+(-h)?", name):
            return name
        context = self.world.dataflow.registry.known(self.session.run_id)
        assert context is not None
        return sealing.seal_lease(name, lineage=self.session.lineage, key=context.seal_key)

    async def complete(self, lease: task_pb2.Lease, **changes: object) -> list[str]:
        """Push all missing members of a lease; return the outcomes' names."""
        outcomes = []
        for member in lease.members:
            reward = {"reward": float(member)} if "reward" not in changes else {}
            outcomes.append(await self.outcome(self.episode(lease, member, **(reward | changes))))
        return outcomes

    async def complete_all(self, leases: Sequence[task_pb2.Lease], **changes: object) -> None:
        """Push all missing members of these leases."""
        for lease in leases:
            await self.complete(lease, **changes)

    async def work(self, count: int = 1, **changes: object) -> list[str]:
        """Lease up to `count` tasks and complete them; return their ids."""
        leases = await self.lease(count)
        await self.complete_all(leases, **changes)
        return [lease.task.task_id for lease in leases]

    async def make_ready(self, groups: int, **changes: object) -> None:
        """Complete this many tasks."""
        while groups > 0:
            groups -= len(await self.work(min(groups, 64), **changes))


@dataclass
class Trainer:
    """A trainer of one policy."""

    world: World
    policy_id: str
    epoch: int = 0
    credential: str = field(default="", repr=False)
    """Of its claim."""

    @property
    def _mine(self) -> dict[str, Any]:
        return {"run_id": self.world.run_id, "policy_id": self.policy_id, "trainer_epoch": self.epoch}

    async def _ask(self, reply: type[Reply], **fields: Any) -> Reply:
        return await self.world.ask(reply, as_=self.credential, **self._mine, **fields)

    async def claim(self, *, trainer_id: str = "test", **held: Any) -> batches.ClaimPolicyResponse:
        """Start a new epoch; `held` are fields of the request."""
        named: dict[str, Any] = {"policy_id": self.policy_id, "trainer_id": trainer_id}
        claim = await self.world.ask(batches.ClaimPolicyResponse, as_=self.credential, **named, **held)
        self.epoch, self.credential = claim.trainer_epoch, claim.session
        return claim

    async def hold(self, **told: Any) -> None:
        """Say that this trainer lives, and what it waits for: fields of the request."""
        await self._ask(batches.HoldPolicyResponse, **told)

    async def release(self, *, doubt: str = "") -> None:
        """Say that this trainer ends, and what it doubts."""
        await self._ask(batches.ReleasePolicyResponse, doubt=doubt)

    async def acquire(
        self, step: int, *, base_version: int = 0, wait_s: float = 5.0
    ) -> batches.AcquireBatchResponse:
        """Acquire the batch of a step."""
        waiting = {"wait_duration": timedelta(seconds=wait_s), "timeout_s": wait_s + 10}
        return await self._ask(batches.AcquireBatchResponse, step=step, base_version=base_version, **waiting)

    async def read_ahead(self, step: int, *, base_version: int = 1) -> batches.AcquireBatchResponse:
        """Acquire the batch of the step after the one in hand, if there is one now."""
        named = {"step": step, "base_version": base_version, "read_ahead": True}
        return await self._ask(batches.AcquireBatchResponse, **named)

    async def fetch(
        self, step: int, *trajectory_ids: str, pack_bytes: int = 0
    ) -> list[batches.FetchBatchResponse]:
        """Fetch payloads."""
        request = batches.FetchBatchRequest(
            **self._mine, step=step, trajectory_ids=trajectory_ids, pack_bytes=pack_bytes
        )
        client = self.world.speaking(self.credential)
        return [item async for item in client.stream(client.batches.FetchBatch, request)]

    async def ack(
        self,
        batch: batch_pb2.Batch,
        *stages: int,
        digest: bytes | None = None,
        mismatch_kl: Sequence[float] = (),
        metrics: Mapping[str, float] | None = None,
    ) -> int:
        """Record stages one after the other, the intent before TRAINED; return the last that was recorded."""
        recorded, digest = 0, batch.digest if digest is None else digest
        named: dict[str, Any] = {"step": batch.step, "batch_id": batch.batch_id, "digest": digest}
        named |= {"mismatch_kl": mismatch_kl, "metrics": metrics}
        before = [batches.BATCH_STAGE_INTENT] if stages[0] == batches.BATCH_STAGE_TRAINED else []
        for stage in (*before, *stages):
            recorded = (await self._ask(batches.AckBatchResponse, **named, stage=stage)).stage
        return recorded

    async def nack(self, step: int) -> int:
        """Give a batch back."""
        return (await self._ask(batches.NackBatchResponse, step=step, reason="test")).returned_groups

    async def quarantine(
        self, step: int, batch_id: str = "", *, reason: str = "digest_mismatch", detail: str = ""
    ) -> int:
        """Give a batch back that nobody can train on; return the dropped trajectories."""
        named = {"step": step, "reason": reason, "detail": detail, "quarantine": True, "batch_id": batch_id}
        return (await self._ask(batches.NackBatchResponse, **named)).quarantined_trajectories

    async def publish(
        self,
        *,
        version: int,
        step: int,
        content: bytes = b"",
        writer_epoch: int | None = None,
        rollback_of: int | None = None,
        num_unreadable_before: int = 0,
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
        reply = await self.world.ask(
            versions.PublishResponse,
            as_=self.credential,
            version=message,
            trainer_epoch=self.epoch,
            num_unreadable_before=num_unreadable_before,
        )
        return reply.version

    async def mark_durable(self, step: int) -> int:
        """Mark steps durable; return the released trajectories."""
        return (await self._ask(batches.MarkDurableResponse, step=step)).released_trajectories

    async def train(self, step: int, *, base_version: int) -> batch_pb2.Batch:
        """Acquire, record the intent, train and publish one step."""
        batch = (await self.acquire(step, base_version=base_version)).batch
        await self.ack(batch, batches.BATCH_STAGE_INTENT, batches.BATCH_STAGE_TRAINED)
        await self.publish(version=base_version + 1, step=step)
        return batch


def name_of(lease: task_pb2.Lease) -> str:
    """A lease as Redis and people know it."""
    return f"{lease.task.task_id}#{lease.attempt}{'-h' if lease.hedge else ''}"


def outcome_name(result: pushes.PushResult) -> str:
    """What became of an episode, `ACCEPTED` for OUTCOME_ACCEPTED."""
    return pushes.Outcome.Name(result.outcome).removeprefix("OUTCOME_")


def make_trajectory(
    trajectory_id: str,
    *,
    policy_id: str = "solver",
    role: str = "",
    num_prompt: int = 4,
    num_response: int = 4,
    version: int = 0,
    swapped_to: int | None = None,
    reward: float = 1.0,
) -> trajectory_pb2.TrajectoryItem:
    """A good trajectory: a prompt that is not trained on, and a response that is.

    The second half of the response was sampled by the version `swapped_to`, if one is given.
    """
    num_tokens = num_prompt + num_response
    half = num_prompt + num_response // 2
    spans: tuple[tuple[int, int, int], ...] = ((num_prompt, num_tokens, version),)
    if swapped_to is not None:
        spans = ((num_prompt, half, version), (half, num_tokens, swapped_to))
    mask = np.arange(num_tokens) >= num_prompt
    columns = Columns(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=spans,
    )
    header = trajectory_pb2.TrajectoryHeader(
        trajectory_id=trajectory_id,
        policy_id=policy_id,
        role=role,
        num_tokens=num_tokens,
        num_trainable_tokens=num_response,
        min_version=version,
        max_version=version if swapped_to is None else swapped_to,
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
    lease_id: str = "",
    episode_id: str = "",
    policies: Sequence[str] = ("solver",),
    reward: float = 1.0,
    version: int | Mapping[str, int] = 0,
    swapped_to: int | None = None,
    failed: bool = False,
    hedge: bool = False,
    num_response: int = 4,
    metrics: Mapping[str, float] | None = None,
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
            swapped_to=swapped_to,
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
        lease_id=lease_id,
        status=trajectory_pb2.EPISODE_STATUS_FAILED if failed else trajectory_pb2.EPISODE_STATUS_FINISHED,
        trajectories=[] if failed else items,
        hedge=hedge,
        metrics=metrics,
    )


@asynccontextmanager
async def served(url: str, folder: Path, **settings: object) -> AsyncIterator[World]:
    """A dataflow server over the Redis at `url`, in this loop."""
    # Sessions of tests say what the test is about, not that they live.
    patient: dict[str, object] = {"node_silence_s": 600.0, "in_process_plugins": ("support", "roles_page")}
    configured = DataflowServerSettings(redis=url, work_dir=folder, **patient | settings)  # type: ignore[arg-type]
    dataflow = Dataflow.assemble(configured)
    keeper = RunKeeper(dataflow)
    server = GrpcServer(
        dataflow.registrations(),
        settings=configured,
        metrics=dataflow.metrics,
        refusals=dataflow.refusals,
        session_keys=dataflow.registry,
        revoked=dataflow.revoked_tokens.seen,
    )
    await keeper.start()
    await server.start()
    try:
        async with AsyncClient(server.address, retry=RetryPolicy(total_s=0)) as client:
            yield World(dataflow=dataflow, client=client, address=server.address)
    finally:
        await server.stop(deadline_s=0.2)
        await keeper.stop(deadline_s=1.0)


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float = 60.0) -> None:
    """Wait until a condition holds: for what the server does on its own."""
    deadline_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"still not so after {within_s:g} s"
        await asyncio.sleep(0.02)


async def answered(call: Callable[[], Awaitable[Result]]) -> Result:
    """Call until the server, or its Redis, is there again; return the answer."""
    while True:
        try:
            return await call()
        except UnavailableError:
            await asyncio.sleep(0.05)


async def until_equal(call: Callable[[], Awaitable[object]], expected: object) -> None:
    """Wait until a call answers this."""

    async def is_equal() -> bool:
        return await call() == expected

    await until(is_equal)
