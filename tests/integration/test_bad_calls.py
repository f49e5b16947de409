"""Bad calls to the dataflow server, as a table: code, reason, the words a person needs, and proof that nothing changed.

Before each row the run has a group that assembles, a bound batch and an older trainer epoch; every key in Redis must be
the same afterwards. Poison is the exception that the contract names: it is counted and quarantined, and the task stays
open. `tests/contract/test_dataflow_errors.py` holds one row per rule of the contract; here are the data and the people.
"""

import dataclasses
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from astraflow._status import from_rpc_error
from astraflow.client import AsyncClient, Connection, RetryPolicy
from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2, trajectory_service_pb2
from astraflow.dataflow.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from support.any_rpc import DENIED, INVALID, MISSING, assert_refused
from support.dataflow_world import Node, Trainer, World, served
from support.redis_content import Content, redis_content
from support.tokens import keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.slow]

POISON, ACCEPTED = trajectory_service_pb2.OUTCOME_POISON, trajectory_service_pb2.OUTCOME_ACCEPTED
TRAINED = batch_service_pb2.BATCH_STAGE_TRAINED
HUGE = "x" * (64 * 2**20)


@dataclass
class Scene:
    """A run in the middle of its work."""

    world: World
    node: Node
    trainer: Trainer
    zombie: Trainer
    lease: task_pb2.Lease
    batch: batch_pb2.Batch
    redis_url: str

    def state(self) -> Content:
        """Every key with its content."""
        return redis_content(self.redis_url)

    def episode(self, **changes: object) -> trajectory_pb2.Episode:
        """A good episode for the open member."""
        return self.node.episode(self.lease, 1, **changes)


@pytest.fixture
async def scene(world: World, redis_url: str) -> Scene:
    """One group in a bound batch, one with a member missing, and a trainer that was replaced."""
    await world.create_run(groups_per_step=1)
    zombie = await world.trainer()
    trainer, node = await world.trainer(), await world.node()
    await world.submit("t1", "t2")
    first, second = await node.lease(2)
    assert await node.complete(first) == ["ACCEPTED", "ACCEPTED"]
    await node.push(node.episode(second, 0))
    # Planned in the background; it has no held-out tasks. Nothing changes by itself after it.
    await world.until(lambda status: [item.complete for item in status.evaluations] == [True])
    batch = (await trainer.acquire(1)).batch
    return Scene(world, node, trainer, zombie, second, batch, redis_url)


def another_batch(scene: Scene) -> batch_pb2.Batch:
    return batch_pb2.Batch(step=1, batch_id="solver.9", digest=scene.batch.digest)


async def lease_in_another_run(scene: Scene) -> object:
    stranger = dataclasses.replace(scene.world, run_id="elsewhere")
    return await dataclasses.replace(scene.node, world=stranger).lease(1, wait_s=0)


async def send_more_than_the_server_reads(scene: Scene) -> object:
    """As a client of another make would, which has no limit of its own."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(scene.world.address, options=options) as channel:
        stub = TrajectoryServiceStub(channel)
        episode = scene.episode(episode_id=HUGE)
        try:
            return await stub.PushEpisode(
                trajectory_service_pb2.PushEpisodeRequest(episode=episode),
                metadata=(("astraflow-session", scene.node.credential),),
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


class Row(NamedTuple):
    """What is done or spoilt, the reason of the refusal, the words a person needs."""

    act: Callable[..., Any]
    reason: str
    words: tuple[str, ...]
    token: str | None = None


OLDER = ("epoch 1", "2")
ROWS = {
    "ack with a digest of other trajectories": Row(
        lambda scene: scene.trainer.ack(scene.batch, TRAINED, digest=b"x" * 32),
        "CONFLICT",
        ("digest", "fetch the batch again"),
    ),
    "ack of another batch": Row(
        lambda scene: scene.trainer.ack(another_batch(scene), TRAINED),
        MISSING,
        ("solver.9 is not bound to step 1", "acquire the step again"),
    ),
    "ack under an older epoch": Row(lambda scene: scene.zombie.ack(scene.batch, TRAINED), "FENCED", OLDER),
    "acquire under an older epoch": Row(lambda scene: scene.zombie.acquire(1, wait_s=0), "FENCED", OLDER),
    "publish under an older epoch": Row(
        lambda scene: scene.zombie.publish(version=1, step=1), "FENCED", OLDER
    ),
    "fetch under an older epoch": Row(lambda scene: scene.zombie.fetch(1), "FENCED", OLDER),
    "give back under an older epoch": Row(lambda scene: scene.zombie.nack(1), "FENCED", OLDER),
    "durable under an older epoch": Row(lambda scene: scene.zombie.mark_durable(0), "FENCED", OLDER),
    "publish a step that is not trained": Row(
        lambda scene: scene.trainer.publish(version=1, step=1), INVALID, ("step 1", "trained", "not finished")
    ),
    "publish another manifest as version 0": Row(
        lambda scene: scene.trainer.publish(version=0, step=0, content=b"other"),
        "CONFLICT",
        ("version 0", "next free number"),
    ),
    "fetch a trajectory of another batch": Row(
        lambda scene: scene.trainer.fetch(1, "somebody-elses"),
        INVALID,
        ("somebody-elses", "are not in batch"),
    ),
    "lease in another run": Row(lease_in_another_run, DENIED, ("elsewhere", "its session is of 'run'")),
    "join a run that is not there": Row(
        lambda scene: scene.world.join("n1", run_id="rum", max_concurrent_tasks=1),
        MISSING,
        ("rum", "run"),
    ),
    "push under a version not announced yet": Row(
        lambda scene: scene.node.push(scene.episode(version=3)),
        "UNKNOWN_VERSION",
        ("version 3", "newest announced here is 0", "push it again"),
    ),
    "send more than a message holds": Row(
        lambda scene: scene.node.push(scene.episode(episode_id=HUGE)),
        INVALID,
        ("bytes, at most 67108864", "send it in parts"),
    ),
    "send more than the server reads": Row(
        send_more_than_the_server_reads, INVALID, ("larger than max", "134217728", "shorten the episode")
    ),
}


@pytest.mark.parametrize("row", ROWS)
async def test_a_bad_call_is_refused_and_changes_nothing(scene: Scene, row: str) -> None:
    call, reason, words, _ = ROWS[row]
    before = scene.state()
    with pytest.raises(AstraflowError) as refused:
        await call(scene)
    assert_refused(refused.value, reason, by_rpc=not row.startswith("send more"))
    assert [word for word in words if word not in refused.value.message] == [], refused.value.message
    assert scene.state() == before
    # What the bad call was about still works.
    assert (await scene.node.push(scene.episode())).outcome == ACCEPTED
    await scene.world.has_account()


Spoil = Callable[[trajectory_pb2.Episode, trajectory_pb2.Trajectory], None]


def column(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    """One column of the body with other bytes."""
    return lambda _, body: setattr(body, name, change(getattr(body, name)))


def logprob(value: float) -> Spoil:
    """The last token's log-prob."""

    def change(content: bytes) -> bytes:
        values = np.frombuffer(content, "<f4").copy()
        values[-1] = value
        return values.tobytes()

    return column("logprobs", change)


def header(**values: object) -> Spoil:
    """Fields of the header."""

    def spoil(episode: trajectory_pb2.Episode, _: trajectory_pb2.Trajectory) -> None:
        episode.trajectories[0].header.MergeFrom(trajectory_pb2.TrajectoryHeader(**values))  # type: ignore[arg-type]

    return spoil


def not_a_body(episode: trajectory_pb2.Episode, _: trajectory_pb2.Trajectory) -> None:
    episode.trajectories[0].body = b"\xff" * 9


POISONS = {
    "token ids cut": Row(column("token_ids", lambda c: c[:-1]), "length_mismatch", ("31 bytes", "need 32")),
    "one token less": Row(
        column("token_ids", lambda c: c[:-4]), "length_mismatch", ("28 bytes", "8 tokens of the header")
    ),
    "log-probs short": Row(column("logprobs", lambda c: c[:-4]), "length_mismatch", ("28 bytes", "need 32")),
    "mask long": Row(column("loss_mask", lambda c: c + b"\0"), "length_mismatch", ("2 bytes", "need 1")),
    "NaN log-prob": Row(logprob(float("nan")), "nan_logprob", ("token 7", "NaN")),
    "infinite log-prob": Row(logprob(float("-inf")), "inf_logprob", ("-inf", "finite")),
    "log-prob above zero": Row(logprob(0.5), "positive_logprob", ("0.5", "above 0")),
    "NaN reward": Row(header(reward=float("nan")), "nan_reward", ("nan", "finite", "fail the episode")),
    "infinite reward": Row(header(reward=float("inf")), "nan_reward", ("inf", "finite")),
    "version that cannot exist": Row(
        header(max_version=99), "future_version", ("version 99", "newest announced is 0")
    ),
    "unknown policy": Row(header(policy_id="critic"), "unknown_policy", ("'critic'", "(solver)")),
    "body of something else": Row(not_a_body, "bad_body", ("9 bytes", "not a serialized Trajectory")),
}


@pytest.mark.parametrize("name", POISONS)
async def test_poison_is_told_by_name_counted_and_leaves_the_member_open(scene: Scene, name: str) -> None:
    spoil, reason, words, _ = POISONS[name]
    episode = scene.episode(episode_id="bad")
    body = trajectory_pb2.Trajectory.FromString(episode.trajectories[0].body)
    spoil(episode, body)
    if spoil is not not_a_body:
        episode.trajectories[0].body = body.SerializeToString()
    before, ingested = scene.state(), (await scene.world.status()).trajectories.ingested
    result = await scene.node.push(episode)
    assert (result.outcome, result.reason) == (POISON, reason), result.detail
    assert [word for word in words if word not in result.detail] == [], result.detail
    now = scene.state()
    changed = {key: key.rpartition("}:")[2].split(":")[0] for key in now if before.get(key) != now[key]}
    assert set(changed.values()) == QUARANTINE
    task = next(key for key, kind in changed.items() if kind == "task")
    assert_only_added(before[task], now[task])
    await scene.world.has_account(ingested=ingested + 1, dropped={"poison": 1}, assembling=1, in_batch=2)
    assert (await scene.node.push(scene.episode())).outcome == ACCEPTED


# The counters of run and node, the sample, the trace, the run's position, and the answer that a repeated push will get.
QUARANTINE = {"counters", "node", "poison", "run", "task", "trace"}


def assert_only_added(before: object, now: object) -> None:
    """The task says what it said, the fate of that episode, and that it refused one."""
    assert isinstance(before, dict)
    assert isinstance(now, dict)
    assert before.items() <= now.items()
    assert [name for name in now if name not in before and b"bad" not in name] == [b"refused"]


async def test_an_unknown_task_is_answered_by_outcome_and_creates_none(scene: Scene) -> None:
    result = await scene.node.push(scene.episode(task_id="never-submitted", episode_id="e"))
    assert (result.outcome, result.reason) == (trajectory_service_pb2.OUTCOME_LATE_CLOSED, "unknown_task")
    await scene.world.has_account(dropped={"late_closed": 1})


@pytest.fixture
async def guarded(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A server that wants tokens, with a run."""
    async with served(redis_url, tmp_path) as world:
        await world.create_run()
    async with served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world:
        world.run_id = "run"
        yield world


UNKNOWN = "UNAUTHENTICATED"
CLAIMS = ("'node' has role rollout", "ClaimPolicy is for ['operator', 'trainer']")
JOINS = ("'learner' has role trainer", "JoinRun is for")
ENDS = ("'person' has role viewer", "UpdateRun is for ['operator']")
STRANGER = ("the token is no JSON web token", "ask this server's operator")
NODE, LEARNER, PERSON = token("node", "rollout"), token("learner", "trainer"), token("person", "viewer")
PEOPLE = {
    "no token": Row(World.status, UNKNOWN, ("needs `authorization: Bearer TOKEN`",)),
    "unknown token": Row(World.status, UNKNOWN, STRANGER, token="stranger"),
    "a node claims a policy": Row(World.trainer, DENIED, CLAIMS, token=NODE),
    "a trainer joins as a node": Row(World.node, DENIED, JOINS, token=LEARNER),
    "a viewer ends the run": Row(World.finish, DENIED, ENDS, token=PERSON),
}


@pytest.mark.parametrize("token", [None, "stranger", NODE])
async def test_who_the_server_is_needs_no_token(guarded: World, token: str | None) -> None:
    async with AsyncClient(
        Connection(guarded.address, token=token or ""), retry=RetryPolicy(total_s=0)
    ) as caller:
        assert (await caller.server_info()).contract_version


@pytest.mark.parametrize("row", PEOPLE)
async def test_who_may_not_call_is_told_what_is_missing_and_changes_nothing(
    guarded: World, redis_url: str, row: str
) -> None:
    call, code, words, token = PEOPLE[row]
    before = redis_content(redis_url)
    async with AsyncClient(
        Connection(guarded.address, token=token or ""), retry=RetryPolicy(total_s=0)
    ) as caller:
        with pytest.raises(AstraflowError) as refused:
            await call(dataclasses.replace(guarded, client=caller))
    assert redis_content(redis_url) == before
    assert refused.value.code == code
    assert [word for word in words if word not in refused.value.message] == [], refused.value.message
