"""A node that turned against its masters: what it forges, replays, reaches for and floods is refused and counted.

Two tenants share a server that asks for tokens. The attacker has a good token of a node of one of them.
"""

import asyncio
import base64
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from astraflow._status import from_rpc_error
from astraflow.client import AsyncClient, Connection, RetryPolicy, typed_stream
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_kit.identity.sealing import Session, issue, new_key, new_lineage
from support.dataflow_world import Node, Trainer, World, make_episode, served
from support.redis_content import redis_content
from support.tokens import KEY_ID, OTHER_KEY, SIGNING_KEY, keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NOW_S = time.time()
CLAIMS: dict[str, Any] = {
    "runs": ["mine"],
    "pools": ["spot"],
    "policies": ["solver"],
    "nodes": ["n1", "n9"],
}
NODE = token("node", "rollout", **CLAIMS)
PUBLIC_PEM = SIGNING_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
FORGED_SESSION = issue(
    Session(speaker="node", run_id="mine", name="n1", number=2, lineage=new_lineage()), key=new_key()
)
JOIN = "/astraflow.dataflow.v1.RunService/JoinRun"
RUN = "/astraflow.dataflow.v1.RunService/GetRun"
PUSH = "/astraflow.dataflow.v1.TrajectoryService/PushEpisode"


def encoded(part: object) -> str:
    """A part of a token."""
    content = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def resigned(algorithm: str, key: bytes) -> str:
    """The claims of an operator, signed by what everybody knows."""
    claims = jwt.decode(token("node", "operator"), options={"verify_signature": False})
    signed = f"{encoded({'alg': algorithm, 'kid': KEY_ID})}.{encoded(claims)}"
    if algorithm == "none":
        return f"{signed}."
    return f"{signed}.{encoded(jwt.get_algorithm_by_name(algorithm).sign(signed.encode(), key))}"


def promoted() -> str:
    """The attacker's own token, changed into an operator's."""
    header, claims, signature = NODE.split(".")
    content = json.loads(base64.urlsafe_b64decode(claims + "=="))
    return f"{header}.{encoded(content | {'role': 'operator', 'runs': ['*']})}.{signature}"


@dataclass
class Scene:
    """The attacker's connection, run and lease; the server is there for the metrics."""

    world: World
    node: Node
    lease: task_pb2.Lease
    before: Node
    """The same node before it restarted."""

    @property
    def _speaking(self) -> AsyncClient:
        return self.world.speaking(self.node.credential)

    @asynccontextmanager
    async def as_(self, sent: str) -> AsyncIterator[World]:
        """The same with another token."""
        connection = Connection(self.world.address, token=sent)
        async with AsyncClient(connection, retry=RetryPolicy(total_s=0)) as client:
            yield dataclasses.replace(self.world, client=client)

    def elsewhere(self) -> Node:
        """The attacker, as if it were a node of the other tenant's run."""
        return dataclasses.replace(self.node, world=dataclasses.replace(self.world, run_id="theirs"))

    def episode(self, **changes: Any) -> trajectory_pb2.Episode:
        """An episode of its own lease."""
        return self.node.episode(self.lease, changes.pop("member", 0), **({"episode_id": "bad"} | changes))

    async def raw(self, rpc: str, content: bytes) -> None:
        """Bytes that no client would send."""
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(self.world.address, options=options) as channel:
            try:
                await channel.unary_unary(rpc)(content, metadata=self._speaking._metadata(), timeout=60)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    async def work(self, *requests: tasks.WorkRequest) -> None:
        """A session of these requests."""

        async def sent() -> AsyncIterator[tasks.WorkRequest]:
            for request in requests:
                yield request
            if not requests:
                await asyncio.Event().wait()

        async for _ in typed_stream(self._speaking.open(self.world.client.tasks.Work, sent())):
            pass

    async def stream(self, *sent: pushes.PushRequest) -> None:
        """A push stream of these requests."""
        call = self._speaking.open(self.world.client.trajectories.Push)
        for request in sent:
            await call.write(request)
        async for _ in typed_stream(call):
            pass


Attack = Callable[[Scene], Awaitable[object]]


def replaced(call: Callable[[Node], Awaitable[object]]) -> Attack:
    """Call as the node was before it restarted."""
    return lambda scene: call(scene.before)


def sending(made: str) -> Attack:
    """Ask for the run with this token."""

    async def attack(scene: Scene) -> object:
        async with scene.as_(made) as world:
            return await world.status()

    return attack


def hello(**changes: Any) -> tasks.WorkRequest:
    """The beginning of a session."""
    named = {"run_id": "mine", "node_id": "n1", "incarnation": 2}
    return tasks.WorkRequest(hello=tasks.Hello(**(named | changes)))


def pushed(**changes: Any) -> Attack:
    """Push an episode of the attacker's lease with changes."""
    return lambda scene: scene.node.push(scene.episode(**changes))


def poisoned(spoil: Callable[[trajectory_pb2.TrajectoryItem], object]) -> Attack:
    """Push an episode whose trajectory was spoilt."""

    async def attack(scene: Scene) -> object:
        episode = scene.episode()
        spoil(episode.trajectories[0])
        return await scene.node.push(episode)

    return attack


def other_body(item: trajectory_pb2.TrajectoryItem) -> None:
    body = trajectory_pb2.Trajectory.FromString(item.body)
    body.trajectory_id = "somebody-elses"
    item.body = body.SerializeToString()


def missing_tokens(item: trajectory_pb2.TrajectoryItem) -> None:
    body = trajectory_pb2.Trajectory.FromString(item.body)
    body.token_ids = body.token_ids[:-4]
    item.body = body.SerializeToString()


UNKNOWN, DENIED, INVALID = "UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT"
FORGED = {
    "no token": (sending(""), UNKNOWN, "missing"),
    "no token of any kind": (sending("letmein"), UNKNOWN, "malformed"),
    "algorithm none": (sending(resigned("none", b"")), UNKNOWN, "algorithm"),
    "HS256 with the public key": (sending(resigned("HS256", PUBLIC_PEM)), UNKNOWN, "algorithm"),
    "signed by its own key": (sending(token("node", "operator", key=OTHER_KEY)), UNKNOWN, "signature"),
    "a key of its own name": (
        sending(token("n", "operator", key=OTHER_KEY, key_id="../x")),
        UNKNOWN,
        "unknown_key",
    ),
    "its own token promoted": (sending(promoted()), UNKNOWN, "signature"),
    "its own token cut": (sending(NODE[:-6]), UNKNOWN, "signature"),
    "replayed after its end": (
        sending(token("n", "operator", nbf=NOW_S - 9e4, exp=NOW_S - 3600)),
        UNKNOWN,
        "expired",
    ),
    "dated ahead": (sending(token("node", "operator", nbf=NOW_S + 3600)), UNKNOWN, "not_yet_valid"),
    "of another installation": (sending(token("node", "operator", aud="staging")), UNKNOWN, "wrong_audience"),
    "replayed after revocation": (sending(token("revoked", "operator")), UNKNOWN, "revoked"),
    "a role that no token has": (sending(token("node", "anyone")), UNKNOWN, "malformed"),
}
OTHERS = {
    "submit tasks": (lambda scene: scene.world.submit("t"), DENIED, "role"),
    "claim the policy": (lambda scene: Trainer(scene.world, "solver").claim(), DENIED, "role"),
    "publish weights": (
        lambda scene: Trainer(scene.world, "solver", 1).publish(version=9, step=1),
        DENIED,
        "role",
    ),
    "end the run": (lambda scene: scene.world.finish(), DENIED, "role"),
    "join their run": (lambda scene: scene.elsewhere().world.node("n9"), DENIED, "run"),
    "lease their tasks": (lambda scene: scene.elsewhere().lease(1, wait_s=0), DENIED, "run"),
    "read their status": (lambda scene: scene.elsewhere().world.status(), DENIED, "run"),
    "push into their run": (pushed(run_id="theirs"), DENIED, "run"),
    "work in their run": (lambda scene: scene.work(hello(run_id="theirs")), DENIED, "run"),
    "turn to their run amid a session": (
        lambda scene: scene.work(hello(), hello(run_id="theirs")),
        DENIED,
        "run",
    ),
    "stream into their run": (
        lambda scene: scene.stream(
            pushes.PushRequest(sequence=1, episodes=[scene.episode(run_id="theirs")]),
        ),
        DENIED,
        "run",
    ),
    "pack an episode of theirs": (
        lambda scene: scene.stream(
            pushes.PushRequest(sequence=1, episodes=[scene.episode(), scene.episode(run_id="theirs")]),
        ),
        DENIED,
        "run",
    ),
    "a run that is a path": (pushed(run_id="../theirs"), DENIED, "run"),
    "a run that ends a key": (pushed(run_id="mine}:x"), DENIED, "run"),
    "a reserved pool": (
        lambda scene: scene.world.join("n9", max_concurrent_tasks=1, pool="reserved"),
        DENIED,
        "pool",
    ),
    "trajectories of another policy": (pushed(policies=("critic",)), DENIED, "policy"),
}
WRONG = {
    # Our own client refuses it.
    "a node id that is a path": (
        lambda scene: scene.raw(JOIN, runs.JoinRunRequest(node_id="../../etc/passwd").SerializeToString()),
        DENIED,
        "node",
    ),
    "another incarnation": (lambda scene: scene.work(hello(incarnation=1)), DENIED, "wrong_session"),
    "another node's name": (lambda scene: scene.work(hello(node_id="n9")), DENIED, "wrong_session"),
    "an incarnation that was replaced": (
        replaced(lambda old: old.lease(1, wait_s=0)),
        "FENCED",
        "session_ended",
    ),
    "pushing as what was replaced": (
        replaced(lambda old: old.push(make_episode(run_id="mine", task_id="t1", member=0))),
        "FENCED",
        "session_ended",
    ),
    "joining as a number it was not given": (
        lambda scene: scene.world.join("n1", incarnation=2**53, max_concurrent_tasks=1),
        DENIED,
        "wrong_session",
    ),
    "joining as what its token is not for": (lambda scene: scene.world.node("n2"), DENIED, "node"),
    "no session": (
        lambda scene: scene.world.ask(tasks.LeaseTasksResponse, max_tasks=1),
        UNKNOWN,
        "no_session",
    ),
    "a session of its own making": (
        lambda scene: scene.world.ask(tasks.LeaseTasksResponse, max_tasks=1, as_=FORGED_SESSION),
        UNKNOWN,
        "wrong_session",
    ),
    "giving back what it does not hold": (
        lambda scene: scene.node.ask(
            tasks.FailTaskResponse, failure=tasks.LeaseFailure(lease_id="t1#1", reason="drain")
        ),
        DENIED,
        "not_lease_holder",
    ),
    "bytes of something else": (lambda scene: scene.raw(RUN, b"\xff" * 64), INVALID, ""),
    "more than a message holds": (lambda scene: scene.raw(PUSH, bytes(65 * 2**20)), INVALID, ""),
    "a session without hello": (
        lambda scene: scene.work(tasks.WorkRequest(renewal=tasks.Renewal())),
        INVALID,
        "",
    ),
    "a session that says nothing": (lambda scene: scene.work(), "DEADLINE_EXCEEDED", ""),
    "pushes out of order": (
        lambda scene: scene.stream(pushes.PushRequest(sequence=7, episodes=[scene.episode()])),
        INVALID,
        "",
    ),
    "more than a pack holds": (
        lambda scene: scene.stream(pushes.PushRequest(sequence=1, episodes=[scene.episode()] * 65)),
        INVALID,
        "",
    ),
    "a push of nothing": (lambda scene: scene.stream(pushes.PushRequest(sequence=1)), INVALID, ""),
    "a version never announced": (pushed(version=9), "UNKNOWN_VERSION", ""),
}
QUARANTINED = {
    "a task that nobody submitted": (pushed(task_id="t9"), "late_closed"),
    "a member that the task has not": (pushed(member=7), "poison"),
    "a body of somebody else": (poisoned(other_body), "poison"),
    "fewer tokens than it says": (poisoned(missing_tokens), "poison"),
    "an id that breaks lines": (pushed(episode_id="a\nb"), "poison"),
    "an endless reward": (pushed(reward=float("inf")), "poison"),
}


@pytest.fixture
async def scene(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """A server of two runs, with the attacker as the second incarnation of a node of one of them."""
    monkeypatch.setattr("astraflow_dataflow.servicers.task_servicer._HELLO_WITHIN_S", 0.3)
    async with (
        served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world,
        AsyncClient(Connection(world.address, token=token("ops", "operator"))) as operator,
        AsyncClient(Connection(world.address, token=token("t", "trainer"))) as trainer,
        AsyncClient(Connection(world.address, token=NODE), retry=RetryPolicy(total_s=0)) as attacker,
    ):
        for run_id in ("theirs", "mine"):
            owned = dataclasses.replace(world, client=operator)
            await owned.create_run(name=run_id)
            await dataclasses.replace(owned, client=trainer).trainer()
            await owned.submit("t1")
        await world.dataflow.revoked_tokens.revoke("jti-revoked")
        own = dataclasses.replace(world, client=attacker, run_id="mine")
        before = await own.node("n1")
        node = await own.node("n1")
        (lease,) = await node.lease(1)
        yield Scene(own, node, lease, before)


def counted(scene: Scene, series: str) -> float:
    """The counter now."""
    lines = scene.world.dataflow.metrics.render().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(series)), 0.0)


async def test_what_a_malicious_node_tries_is_refused_and_counted(scene: Scene, redis_url: str) -> None:
    attacks: dict[str, tuple[Attack, str, str]] = FORGED | OTHERS | WRONG  # type: ignore[operator]
    before = theirs(redis_url)
    gaps = []
    for name, (attack, reason, why) in attacks.items():
        series = f'astraflow_rpcs_refused_total{{reason="{reason}",why="{why}"}}'
        seen = counted(scene, series)
        try:
            answered = await attack(scene)
        except AstraflowError as error:
            found = (error.reason, error.metadata.get("reason", "") if why else "")
            if found != (reason, why) or counted(scene, series) != seen + 1:
                gaps.append(f"{name}: {found} {error.message}")
            if any(part in error.message for part in NODE.split(".")):
                gaps.append(f"{name}: the answer repeats the token")
        else:
            gaps.append(f"{name}: answered {answered}")
    assert gaps == []
    assert len(attacks) + len(QUARANTINED) >= 40
    assert theirs(redis_url) == before


async def test_what_it_pushes_is_counted_and_never_trained_on(scene: Scene) -> None:
    for name, (attack, outcome) in QUARANTINED.items():
        series = f'astraflow_dataflow_pushes_total{{outcome="{outcome}"}}'
        seen = counted(scene, series)
        result: Any = await attack(scene)
        assert (name, counted(scene, series)) == (name, seen + 1), result
    async with scene.as_(token("v", "viewer")) as world:
        account = (await dataclasses.replace(world, run_id="mine").status()).trajectories
    assert (account.ready, account.in_batch, account.trained) == (0, 0, 0)
    assert (await scene.node.outcome(scene.episode(episode_id="good"))) == "ACCEPTED"


def theirs(redis_url: str) -> dict[str, object]:
    """Everything of the other tenant's run."""
    return {key: held for key, held in redis_content(redis_url).items() if key.startswith("af:{theirs}:")}
