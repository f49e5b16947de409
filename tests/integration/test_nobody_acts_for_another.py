"""Nobody acts for another: what one member of an installation tries on another is refused, counted, and changes nothing
of its victim, whose own next call succeeds.

Two runs share a server that asks for tokens. In the first there are nodes, a trainer of each of two policies, and one
that was replaced; each has a good token and session of its own, and knows all that is no secret. What agents and served
environments try on one another is in `test_app` of the node's agents and in `test_environment_service`.
"""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astraflow.client import AsyncClient, Connection, RetryPolicy, typed_stream
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_pb2, run_pb2, version_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import AstraflowError, FencedError
from astraflow.rollout.v1 import task_pb2
from support.dataflow_world import Node, Trainer, World, outcome_name, served
from support.tokens import keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.slow]

POLICIES = ("solver", "critic")


@dataclass
class Scene:
    """Everybody, each with its own token; victims are Alice and Carol, and the run that is not Mallory's."""

    operator: World
    viewer: World
    alice: Node
    """Works on `lease`."""
    bob: Node
    """Works on `bobs`."""
    bert: Node
    """Has a token for nodes of every name."""
    carol: Trainer
    """Holds `batch`, of step 1 of `solver`."""
    dave: Trainer
    """Trains `critic`; its token is for all policies."""
    diana: World
    """Has a trainer's token for `critic` alone."""
    frank: Trainer
    """Trained `solver` before Carol."""
    eve: World
    """Has a trainer's token for `solver`, and claimed nothing."""
    mallory: Node
    """A node of the other run."""
    mike: Trainer
    """A trainer of the other run."""
    oscar: World
    """An operator of the other run."""
    lease: task_pb2.Lease
    bobs: task_pb2.Lease
    batch: batch_pb2.Batch

    def counted(self, refused: str) -> float:
        """What the server ever refused in this way."""
        reason, _, why = refused.partition(" ")
        series = REFUSALS.get(reason, 'astraflow_rpcs_refused_total{{reason="{reason}",why="{why}"}}')
        started = series.format(reason=reason, why=why)
        lines = self.operator.dataflow.metrics.render().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(started))


REFUSALS = {
    "REFUSED": 'astraflow_dataflow_refused_episodes_total{{reason="{why}"}}',
    **dict.fromkeys(("LOST", "CANCEL"), "astraflow_dataflow_refused_leases_total"),
}
"""The series that counts an answer which is no error; an error has its own."""


@asynccontextmanager
async def world_as(world: World, sent: str, *, run_id: str) -> AsyncIterator[World]:
    """The server as the bearer of a token sees it."""
    connection = Connection(world.address, token=sent)
    async with AsyncClient(connection, retry=RetryPolicy(total_s=0)) as client:
        yield dataclasses.replace(world, client=client, run_id=run_id)


@pytest.fixture
async def scene(redis_url: str, tmp_path: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(
            served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path))
        )

        async def member(name: str, role: str, run_id: str = "run", **claims: Any) -> World:
            sent = token(name, role, **{"runs": [run_id], "nodes": None} | claims)
            return await stack.enter_async_context(world_as(world, sent, run_id=run_id))

        for name, policies in (("other", ("solver",)), ("run", POLICIES)):
            founder = await member(f"founder-{name}", "operator", name)
            await founder.create_run(name=name, policies=policies, groups_per_step=1, max_staleness=8)
        operator = await member("operator", "operator")
        alice = await (await member("alice", "rollout")).node("alice")
        bob = await (await member("bob", "rollout")).node("bob")
        mallory = await (await member("mallory", "rollout", "other")).node("mallory")
        mike = await (await member("mike", "trainer", "other")).trainer()
        frank = await (await member("frank", "trainer", policies=["solver"])).trainer()
        carol = await (await member("carol", "trainer", policies=["solver"])).trainer()
        dave = await (await member("dave", "trainer")).trainer("critic")
        await operator.submit("done")
        await alice.work(policies=POLICIES)
        batch = (await carol.acquire(1)).batch
        await operator.submit("hers", "his")
        (lease,), (bobs,) = await alice.lease(), await bob.lease()
        yield Scene(
            operator=operator,
            viewer=await member("viewer", "viewer"),
            bert=await (await member("bert", "rollout", nodes=["*"])).node("bert"),
            diana=await member("diana", "trainer", policies=["critic"]),
            alice=alice,
            bob=bob,
            carol=carol,
            dave=dave,
            frank=frank,
            eve=await member("eve", "trainer", policies=["solver"]),
            mallory=mallory,
            mike=mike,
            oscar=await member("oscar", "operator", "other"),
            lease=lease,
            bobs=bobs,
            batch=batch,
        )


Act = Callable[[Scene], Awaitable[object]]
Attack = tuple[Act, str]
"""What is tried, and how it is refused: the reason of the error or of the outcome, and its slug."""
ROLE, RUN, POLICY = "PERMISSION_DENIED role", "PERMISSION_DENIED run", "PERMISSION_DENIED policy"
WRONG, STRANGER, NO_SESSION = (
    "PERMISSION_DENIED wrong_session",
    "UNAUTHENTICATED wrong_session",
    "UNAUTHENTICATED no_session",
)
NODE, IN_USE = "PERMISSION_DENIED node", "FAILED_PRECONDITION name_in_use"
NOT_HOLDER = "not_lease_holder"


def said_by(actor: World | Node | Trainer) -> Callable[..., Awaitable[Any]]:
    """How somebody calls an rpc: with its own token, and its credential unless it names another."""
    world = actor if isinstance(actor, World) else actor.world
    credential = "" if isinstance(actor, World) else actor.credential
    return lambda reply, **fields: world.ask(reply, **{"as_": credential} | fields)


def as_bob(reply: type[Any], **fields: Any) -> Act:
    return lambda scene: said_by(scene.bob)(reply, **fields)


def renewed(lease_id: Callable[[Scene], str]) -> Act:
    async def renew(scene: Scene) -> object:
        return await scene.bob.ask(tasks.RenewLeasesResponse, lease_ids=[lease_id(scene)])

    return renew


def failed(lease_id: Callable[[Scene], str], **fields: Any) -> Act:
    async def fail(scene: Scene) -> object:
        failure = tasks.LeaseFailure(lease_id=lease_id(scene), reason="workflow_error")
        return await scene.bob.ask(tasks.FailTaskResponse, failure=failure, **fields)

    return fail


def pushed(**changes: Any) -> Act:
    """Bob pushes Alice's task; a change may be a function of the scene."""

    async def push(scene: Scene) -> object:
        found = {name: value(scene) if callable(value) else value for name, value in changes.items()}
        lease_id = found.pop("lease_id", scene.lease.lease_id)
        episode = scene.bob.episode(scene.lease, 0, **{"reward": 1e6, "policies": POLICIES} | found)
        episode.lease_id = lease_id
        return await scene.bob.ask(pushes.PushEpisodeResponse, episode=episode)

    return push


async def pushed_40_broken_ones(scene: Scene) -> object:
    """As many as drain a node that pushes them."""
    episodes = [
        scene.bob.episode(scene.lease, 0, reward=float("nan"), node_id="alice", episode_id=f"e{i}")
        for i in range(40)
    ]
    results = await scene.bob.pack(*episodes)
    assert len({outcome_name(result) for result in results}) == 1
    return results[0]


def worked(first: Callable[[Scene], list[tasks.WorkRequest]]) -> Act:
    """Bob says this on a stream."""

    async def work(scene: Scene) -> object:
        client = scene.bob.world.speaking(scene.bob.credential)
        call = client.open(client.tasks.Work)
        for request in first(scene):
            await call.write(request)
        async for response in typed_stream(call):
            if response.WhichOneof("kind") == "cancel":
                return f"CANCEL {response.cancel.lease_id == scene.lease.lease_id}"
        return "ended"

    return work


def hello(**fields: Any) -> tasks.WorkRequest:
    return tasks.WorkRequest(hello=tasks.Hello(run_id="run", **fields))


def joined(shown: Callable[[Scene], str] | None = None, *, by: str = "bob", **fields: Any) -> Act:
    """Somebody joins under the name of Alice, who lives."""

    async def join(scene: Scene) -> object:
        named = {"node_id": "alice", "max_concurrent_tasks": 1} | fields
        credential = shown(scene) if shown else ""
        return await getattr(scene, by).world.ask(runs.JoinRunResponse, as_=credential, **named)

    return join


def session_of(node: str) -> Callable[[Scene], str]:
    return lambda scene: getattr(scene, node).credential


NODE_ON_NODE: dict[str, Attack] = {
    "leases in her name": (as_bob(tasks.LeaseTasksResponse, node_id="alice", max_tasks=1), WRONG),
    "leases under another number": (
        as_bob(tasks.LeaseTasksResponse, node_id="bob", incarnation=2, max_tasks=1),
        WRONG,
    ),
    "leases under the largest number": (
        as_bob(tasks.LeaseTasksResponse, node_id="bob", incarnation=2**53, max_tasks=1),
        WRONG,
    ),
    "leases without a session": (
        as_bob(tasks.LeaseTasksResponse, node_id="alice", max_tasks=1, as_=""),
        NO_SESSION,
    ),
    "renews her lease": (renewed(lambda scene: scene.lease.lease_id), "LOST"),
    "renews a guess of it": (renewed(lambda scene: "hers#1"), "LOST"),
    "renews in her name": (as_bob(tasks.RenewLeasesResponse, node_id="alice", lease_ids=["hers#1"]), WRONG),
    "fails her task": (failed(lambda scene: scene.lease.lease_id), f"PERMISSION_DENIED {NOT_HOLDER}"),
    "fails a guess of it": (failed(lambda scene: "hers#1"), f"PERMISSION_DENIED {NOT_HOLDER}"),
    "fails it with the seal of his own": (
        failed(lambda scene: scene.bobs.lease_id.replace("his", "hers")),
        f"PERMISSION_DENIED {NOT_HOLDER}",
    ),
    "fails it in her name": (failed(lambda scene: scene.lease.lease_id, node_id="alice"), WRONG),
    "pushes her task": (pushed(), f"REFUSED {NOT_HOLDER}"),
    "pushes it in her name": (pushed(node_id="alice"), "REFUSED wrong_session"),
    "pushes it in the name of a node that never joined": (pushed(node_id="nobody"), "REFUSED wrong_session"),
    "pushes it with his own lease": (
        pushed(lease_id=lambda scene: scene.bobs.lease_id),
        f"REFUSED {NOT_HOLDER}",
    ),
    "pushes it with a guess of the lease": (pushed(lease_id="hers#1"), f"REFUSED {NOT_HOLDER}"),
    "pushes it with no lease": (pushed(lease_id=""), f"REFUSED {NOT_HOLDER}"),
    "pushes it with the seal of his own": (
        pushed(lease_id=lambda scene: scene.bobs.lease_id.replace("his", "hers")),
        f"REFUSED {NOT_HOLDER}",
    ),
    "pushes it as an attempt that was never leased": (pushed(attempt=7), f"REFUSED {NOT_HOLDER}"),
    "pushes his own as another attempt": (
        pushed(task_id="his", attempt=7, lease_id=lambda scene: scene.bobs.lease_id),
        "REFUSED unknown_attempt",
    ),
    "pushes his own as a hedge": (
        pushed(task_id="his", hedge=True, lease_id=lambda scene: scene.bobs.lease_id),
        "REFUSED unknown_attempt",
    ),
    "pushes 40 broken episodes that name her": (pushed_40_broken_ones, "REFUSED wrong_session"),
    "pushes into the other run": (pushed(run_id="other", task_id="t"), RUN),
    "works in her name": (worked(lambda scene: [hello(node_id="alice", incarnation=1)]), WRONG),
    "works under another number": (worked(lambda scene: [hello(node_id="bob", incarnation=9)]), WRONG),
    "works and says that he holds her lease": (
        worked(
            lambda scene: [
                hello(node_id="bob", incarnation=1, held=tasks.Renewal(lease_ids=[scene.lease.lease_id])),
            ]
        ),
        "CANCEL True",
    ),
    "receives her lease on a stream": (
        worked(
            lambda scene: [
                hello(),
                tasks.WorkRequest(receipt=tasks.Receipt(lease_ids=[scene.lease.lease_id])),
            ]
        ),
        "CANCEL True",
    ),
    "fails her lease on a stream": (
        worked(lambda scene: [hello(), tasks.WorkRequest(failure=FAILED["failure"](scene))]),
        f"PERMISSION_DENIED {NOT_HOLDER}",
    ),
    "renews her lease with a credential that he changed": (
        lambda scene: scene.bob.world.ask(
            tasks.RenewLeasesResponse,
            lease_ids=[scene.lease.lease_id],
            as_=scene.bob.credential.replace("bob", "alice"),
        ),
        STRANGER,
    ),
    "joins under her name": (joined(), NODE),
    "joins under her name as the largest number": (joined(incarnation=2**53), NODE),
    "joins under her name with hers, which leaked": (joined(session_of("alice")), NODE),
    "joins under her name by a token for all nodes": (joined(by="bert"), IN_USE),
    "joins under a name that begins as his own": (joined(node_id="bob-2"), NODE),
    "joins so with a credential of his own": (joined(session_of("bert"), by="bert"), IN_USE),
    "joins so with one that he changed": (
        joined(lambda scene: scene.bert.credential.replace("bert", "alice"), by="bert"),
        IN_USE,
    ),
    "joins so as the largest number": (joined(by="bert", incarnation=2**53), WRONG),
    "speaks with her credential, which leaked": (
        lambda scene: scene.bob.world.ask(
            tasks.RenewLeasesResponse, lease_ids=[scene.lease.lease_id], as_=session_of("alice")(scene)
        ),
        NODE,
    ),
}


def on_her_batch(
    reply: type[Any], who: str, *, named: Callable[[Scene], dict[str, Any]] | None = None, **fields: Any
) -> Act:
    """Somebody speaks of Carol's policy and epoch."""

    async def speak(scene: Scene) -> object:
        told = {"policy_id": "solver", "trainer_epoch": scene.carol.epoch} | fields
        return await said_by(getattr(scene, who))(reply, **told | (named(scene) if named else {}))

    return speak


def of_batch(scene: Scene) -> dict[str, Any]:
    batch = scene.batch
    return {
        "step": 1,
        "batch_id": batch.batch_id,
        "digest": batch.digest,
        "stage": batches.BATCH_STAGE_INTENT,
    }


def version_1(scene: Scene) -> dict[str, Any]:
    version = version_pb2.Version(
        policy_id="solver",
        version=1,
        sequence=1,
        step=1,
        manifest_sha256=b"." * 32,
        trainer_epoch=scene.carol.epoch,
    )
    return {"version": version, "trainer_epoch": scene.dave.epoch}


async def fetched_by_eve(scene: Scene) -> object:
    request = batches.FetchBatchRequest(
        run_id="run", policy_id="solver", trainer_epoch=scene.carol.epoch, step=1
    )
    client = scene.eve.client
    return [item async for item in client.stream(client.batches.FetchBatch, request)]


def forged(scene: Scene) -> str:
    """The credential of Frank's claim, as if it were Carol's."""
    return scene.frank.credential.replace(f"/{scene.frank.epoch}/", f"/{scene.carol.epoch}/")


def as_eve(reply: type[Any], **fields: Any) -> Act:
    return on_her_batch(reply, "eve", **fields)


def as_eve_claiming(**fields: Any) -> Act:
    """Eve claims Carol's policy as any trainer of it may, under the name that Carol gave herself."""
    named = {"policy_id": "solver", "trainer_id": "test"}
    return lambda scene: scene.eve.ask(batches.ClaimPolicyResponse, **named, **fields)


CALLS: dict[str, tuple[type[Any], Callable[[Scene], dict[str, Any]]]] = {
    "holds": (batches.HoldPolicyResponse, lambda _: {"waiting_for": "trainer_hung"}),
    "releases": (batches.ReleasePolicyResponse, lambda _: {"doubt": "it is mine"}),
    "acquires": (batches.AcquireBatchResponse, lambda _: {"step": 1}),
    "acks": (batches.AckBatchResponse, of_batch),
    "nacks": (batches.NackBatchResponse, lambda scene: {"step": 1, "batch_id": scene.batch.batch_id}),
    "renews": (batches.RenewBatchResponse, lambda _: {"step": 1}),
    "marks durable": (batches.MarkDurableResponse, lambda _: {"step": 1}),
}
"""Everything that a trainer says of its policy."""
TRAINER_ON_TRAINER: dict[str, Attack] = {
    **{
        f"{does} without a claim": (as_eve(reply, named=named), NO_SESSION)
        for does, (reply, named) in CALLS.items()
    },
    **{
        f"{does} under the claim before": (
            on_her_batch(
                reply, "frank", named=lambda scene, named=named: named(scene) | {"trainer_epoch": 1}
            ),  # type: ignore[misc]
            "FENCED",
        )
        for does, (reply, named) in CALLS.items()
    },
    **{
        f"{does} with the claim of another policy": (on_her_batch(reply, "dave", named=named), WRONG)
        for does, (reply, named) in CALLS.items()
    },
    "acks as the newest epoch under the claim before": (
        on_her_batch(batches.AckBatchResponse, "frank", named=of_batch),
        WRONG,
    ),
    "acks with a credential that was changed": (
        lambda scene: scene.eve.ask(
            batches.AckBatchResponse,
            policy_id="solver",
            trainer_epoch=scene.carol.epoch,
            as_=forged(scene),
            **of_batch(scene),
        ),
        STRANGER,
    ),
    "says without a claim what her policy waits for": (
        lambda scene: scene.eve.ask(
            batches.HoldPolicyResponse, policy_id="solver", waiting_for="trainer_hung", detail="kill her"
        ),
        "POLICY_HELD",
    ),
    **{
        f"accepts a loss that her policy does not have, up to step {step}": (
            as_eve_claiming(accepted_loss=batches.AcceptedLoss(identity="0" * 32, step=step)),
            "FAILED_PRECONDITION",
        )
        for step in (0, 1, 10_000_000)
    },
    "fetches without a claim": (fetched_by_eve, NO_SESSION),
    "announces without a claim": (
        lambda scene: scene.eve.ask(
            versions.PublishResponse, **version_1(scene) | {"trainer_epoch": scene.carol.epoch}
        ),
        NO_SESSION,
    ),
    "announces under a claim of its own": (
        lambda scene: said_by(scene.dave)(versions.PublishResponse, **version_1(scene)),
        WRONG,
    ),
    "claims another policy than its token's": (
        lambda scene: scene.diana.ask(batches.ClaimPolicyResponse, policy_id="solver", trainer_id="diana"),
        POLICY,
    ),
    "claims again in her name": (
        lambda scene: scene.eve.ask(
            batches.ClaimPolicyResponse, policy_id="solver", trainer_id="test", held_epoch=scene.carol.epoch
        ),
        WRONG,
    ),
    "claims again with a claim of its own": (
        lambda scene: scene.frank.world.ask(
            batches.ClaimPolicyResponse,
            policy_id="solver",
            trainer_id="test",
            held_epoch=scene.carol.epoch,
            as_=scene.frank.credential,
        ),
        WRONG,
    ),
}


def asked(who: str, reply: type[Any], **fields: Any) -> Act:
    """Somebody calls an rpc; a field may be a function of the scene."""

    async def ask(scene: Scene) -> object:
        told = {name: value(scene) if callable(value) else value for name, value in fields.items()}
        return await said_by(getattr(scene, who))(reply, **told)

    return ask


VOIDED = {"policy_id": "solver", "step": 1, "batch_id": lambda scene: scene.batch.batch_id, "action": 1}
ANNOUNCED = {"version": lambda scene: version_1(scene)["version"]}
CLAIMED = {"policy_id": "solver", "trainer_id": "test"}
FAILED = {"failure": lambda scene: tasks.LeaseFailure(lease_id=scene.lease.lease_id, reason="workflow_error")}
PUSHED = {"episode": lambda scene: scene.alice.episode(scene.lease, 0)}
ACROSS_ROLES: dict[str, Attack] = {
    **{
        f"a node {does}": (on_her_batch(reply, "bob", named=named), ROLE)
        for does, (reply, named) in CALLS.items()
    },
    **{
        f"an operator {does}": (on_her_batch(reply, "operator", named=named), ROLE)
        for does, (reply, named) in CALLS.items()
    },
    "a node claims": (asked("bob", batches.ClaimPolicyResponse, **CLAIMED), ROLE),
    "a node announces": (asked("bob", versions.PublishResponse, **ANNOUNCED), ROLE),
    "a node voids": (asked("bob", batches.VoidBatchResponse, **VOIDED), ROLE),
    "a trainer voids": (asked("dave", batches.VoidBatchResponse, **VOIDED), ROLE),
    "a viewer voids": (asked("viewer", batches.VoidBatchResponse, **VOIDED), ROLE),
    "a viewer claims": (asked("viewer", batches.ClaimPolicyResponse, **CLAIMED), ROLE),
    "an operator announces without a claim": (
        asked("operator", versions.PublishResponse, **ANNOUNCED),
        NO_SESSION,
    ),
}
TO_ALICE_BY_ROLE: dict[str, Attack] = {
    f"{article} {who} {does}": (asked(who if who != "trainer" else "dave", reply, **fields), ROLE)
    for article, who in (("a", "trainer"), ("an", "operator"), ("a", "viewer"))
    for does, reply, fields in (
        ("joins", runs.JoinRunResponse, {"node_id": "alice", "max_concurrent_tasks": 1}),
        ("leases", tasks.LeaseTasksResponse, {"node_id": "alice", "max_tasks": 1}),
        ("renews", tasks.RenewLeasesResponse, {"lease_ids": lambda scene: [scene.lease.lease_id]}),
        ("fails", tasks.FailTaskResponse, FAILED),
        ("pushes", pushes.PushEpisodeResponse, PUSHED),
    )
} | {
    "a viewer drains": (asked("viewer", admin.DrainNodeResponse, node_id="alice"), ROLE),
    "a node drains": (asked("bob", admin.DrainNodeResponse, node_id="alice"), ROLE),
}
RUN_ID = {"run_id": "run"}
TO_ALICE_FROM_ELSEWHERE: dict[str, Attack] = {
    "joins": (asked("mallory", runs.JoinRunResponse, **RUN_ID, node_id="alice", max_concurrent_tasks=1), RUN),
    "leases": (asked("mallory", tasks.LeaseTasksResponse, **RUN_ID, max_tasks=1), RUN),
    "renews": (
        asked("mallory", tasks.RenewLeasesResponse, lease_ids=lambda scene: [scene.lease.lease_id]),
        "LOST",
    ),
    "fails": (asked("mallory", tasks.FailTaskResponse, **FAILED), f"PERMISSION_DENIED {NOT_HOLDER}"),
    "pushes": (asked("mallory", pushes.PushEpisodeResponse, **PUSHED), RUN),
    "shows her credential": (
        asked("mallory", tasks.LeaseTasksResponse, max_tasks=1, as_=session_of("alice")),
        RUN,
    ),
    "drains": (asked("oscar", admin.DrainNodeResponse, **RUN_ID, node_id="alice"), RUN),
}
TO_CAROL_FROM_ELSEWHERE: dict[str, Attack] = {
    **{
        f"{does}": (
            on_her_batch(reply, "mike", named=lambda scene, named=named: named(scene) | RUN_ID),  # type: ignore[misc]
            RUN,
        )
        for does, (reply, named) in CALLS.items()
    },
    "claims": (asked("mike", batches.ClaimPolicyResponse, **RUN_ID, **CLAIMED), RUN),
    "shows her credential": (
        asked("mike", batches.RenewBatchResponse, **RUN_ID, step=1, as_=lambda scene: scene.carol.credential),
        RUN,
    ),
    "voids": (asked("oscar", batches.VoidBatchResponse, **RUN_ID, **VOIDED), RUN),
    "ends her run": (
        asked("oscar", runs.UpdateRunResponse, **RUN_ID, state=run_pb2.RUN_STATE_FINISHING),
        RUN,
    ),
    "deletes her run": (asked("oscar", runs.DeleteRunResponse, **RUN_ID), RUN),
}
ATTACKS: dict[str, tuple[str, dict[str, Attack]]] = {
    "a node on a node": ("alice", NODE_ON_NODE),
    "others on a node": ("alice", TO_ALICE_BY_ROLE),
    "another run on a node": ("alice", TO_ALICE_FROM_ELSEWHERE),
    "a trainer on a trainer": ("carol", TRAINER_ON_TRAINER),
    "others on a trainer": ("carol", ACROSS_ROLES),
    "another run on a trainer": ("carol", TO_CAROL_FROM_ELSEWHERE),
}


def refusal_in(answer: object) -> str:
    """How an answer refuses, where it is not an error."""
    if isinstance(answer, pushes.PushEpisodeResponse):
        answer = answer.result
    if isinstance(answer, pushes.PushResult):
        return f"{outcome_name(answer)} {answer.reason}"
    if isinstance(answer, tasks.RenewLeasesResponse):
        return "LOST" if answer.lost_lease_ids else "RENEWED"
    return str(answer)


async def seen_of(scene: Scene, victim: str) -> object:
    """What an attack on a victim must not change."""
    now = await scene.operator.status()
    of_run = (
        now.state,
        now.trajectories.SerializeToString(deterministic=True),
        now.dead_letters,
        len(now.failures),
    )
    if victim == "carol":
        told = [wait.reason for wait in now.waits if wait.reason == "trainer_hung"]
        return (
            of_run,
            told,
            [(one.trainer_epoch, one.version.version, one.last_finished_step) for one in now.policies],
        )
    (her,) = [node for node in now.nodes if node.node_id == "alice"]
    return of_run, (her.incarnation, her.restarts, her.leases, her.episodes, her.drain_reason, her.connected)


async def acts_for_itself(scene: Scene, victim: str) -> None:
    """The victim's next own call succeeds."""
    if victim == "alice":
        assert await scene.alice.renew(scene.lease.lease_id) == []
    else:
        await scene.carol.hold()
        await scene.carol._ask(batches.RenewBatchResponse, step=1)


@pytest.mark.parametrize(("victim", "attacks"), ATTACKS.values(), ids=ATTACKS)
async def test_an_attack_is_refused_and_counted_and_its_victim_works_on(
    scene: Scene, victim: str, attacks: dict[str, Attack]
) -> None:
    before, gaps = await seen_of(scene, victim), list[str]()
    for name, (act, refused) in attacks.items():
        num_refused = scene.counted(refused)
        try:
            found = refusal_in(await act(scene))
        except AstraflowError as error:
            found = f"{error.reason} {error.metadata.get('reason', '')}".strip()
            if any(secret in error.message for secret in secrets_of(scene)):
                gaps.append(f"{name}: the refusal tells a secret")
        if found != refused:
            gaps.append(f"{name}: {found}, not {refused}")
        if scene.counted(refused) <= num_refused:
            gaps.append(f"{name}: not counted")
        if (after := await seen_of(scene, victim)) != before:
            gaps.append(f"{name}: {before} became {after}")
        await acts_for_itself(scene, victim)
    assert not gaps, "\n".join(gaps)
    # And what it was at is taken in.
    if victim == "alice":
        assert await scene.alice.complete(scene.lease, policies=POLICIES) == ["ACCEPTED", "ACCEPTED"]
    else:
        assert await scene.carol.ack(scene.batch, batches.BATCH_STAGE_TRAINED) == batches.BATCH_STAGE_TRAINED
        assert (await scene.carol.publish(version=1, step=1)).version == 1


async def test_who_takes_a_policy_over_is_named_by_its_token_whatever_it_calls_itself(scene: Scene) -> None:
    await as_eve_claiming()(scene)
    with pytest.raises(FencedError, match=r"not the current one \(3, of trainer eve \(test\)\)"):
        await scene.carol.hold()
    events = (await scene.operator.ask(admin.ListEventsResponse)).events
    assert "trainer eve (test), epoch 3" in [event.detail for event in events]
    with pytest.raises(FencedError):  # nor is Eve's claim one of Carol's whose answer she did not get
        await scene.carol.claim(held_epoch=scene.carol.epoch)


async def test_whose_last_step_is_named_no_more_ends_no_run(scene: Scene) -> None:
    await as_eve_claiming(last_step=1)(scene)
    await scene.carol.claim()
    assert await scene.carol.ack(scene.batch, batches.BATCH_STAGE_TRAINED) == batches.BATCH_STAGE_TRAINED
    await scene.carol.mark_durable(1)
    assert (await scene.operator.status()).state == run_pb2.RUN_STATE_ACTIVE


def secrets_of(scene: Scene) -> list[str]:
    """What no refusal may show to whoever does not have it."""
    return [session_of("alice")(scene), scene.carol.credential]


def test_there_are_as_many_attacks_as_were_asked_for() -> None:
    assert sum(len(attacks) for _, attacks in ATTACKS.values()) >= 50
