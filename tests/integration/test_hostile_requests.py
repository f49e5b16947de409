"""Thousands of mutated requests to every rpc of every daemon: refused in words or answered, and no server the worse."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from astraflow._contract.rpcs import read_contract
from astraflow.dataflow.v1 import run_pb2, task_service_pb2, version_pb2
from astraflow.errors import InvalidArgumentError
from astraflow.raas.v1 import environment_service_pb2_grpc
from astraflow.rollout.v1 import task_pb2
from astraflow.trainer.v1 import trainer_service_pb2 as pb
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from astraflow_environment.servicer import EnvironmentServicer
from astraflow_environment.sessions import Sessions
from astraflow_environment.settings import EnvironmentSettings
from astraflow_kit.log import configure
from astraflow_kit.metrics import Metrics
from astraflow_kit.serve import Context, GrpcServer
from astraflow_kit.settings import DaemonSettings
from astraflow_raas.server import registrations_of
from astraflow_trainer.controls import Controls
from astraflow_trainer.progress import Phase, Progress
from astraflow_trainer.servicer import TrainerServicer
from support.any_rpc import COMMON
from support.attack import TOO_LONG_S, Attack, KeptState
from support.dataflow_world import ATTRIBUTES, World, recipe_text
from support.raas_node import local_node

pytestmark = pytest.mark.integration

SEED = 1
COUNTS = [
    pytest.param(2_000, marks=[pytest.mark.ci, pytest.mark.timeout(600)], id="2000"),
    pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)], id="100000"),
]


def serially(count: int) -> int:
    """How many of them are sent one by one."""
    return max(100, count // 500)


@pytest.fixture(autouse=True)
def logs(tmp_path: Path) -> Iterator[Path]:
    """Written as a daemon writes them: what an attack adds to them is a part of what it costs."""
    path = tmp_path / "log"
    with path.open("w") as file:
        configure("attacked", log_format="json", stream=file)
        yield path


def rpcs(*services: str) -> list[str]:
    """Full names of the rpcs that this release provides."""
    found = (descriptor_pool.Default().FindServiceByName(f"astraflow.{service}") for service in services)
    methods = chain.from_iterable(service.methods for service in found)
    return [method.full_name for method in methods if not read_contract(method).capability]


def good_request(kind: type[Message], known: Mapping[str, object]) -> Message:
    """A request with what is known for the fields that it has."""
    request: Any = kind()
    for name, value in known.items():
        described = kind.DESCRIPTOR.fields_by_name.get(name)
        if described is None:
            continue
        if isinstance(value, list) == described.is_repeated and (
            isinstance(value, Message) == (described.message_type is not None) or described.is_repeated
        ):
            request.MergeFrom(kind(**{name: value}))
    return request  # type: ignore[no-any-return]


async def known_of(
    world: World, speaker: str
) -> tuple[str, dict[str, object], list[task_service_pb2.WorkRequest]]:
    """What is there in a run with a trainer, a node with a lease and a bound batch: the credential of a speaker, fields
    of requests, and messages of a session.
    """
    trainer, node, batch = await world.bound()
    (lease,) = await node.lease()
    known = COMMON | {
        "task_id": lease.task.task_id,
        "step": 1,
        "batch_id": batch.batch_id,
        "digest": batch.digest,
        "stage": 1,
        "action": 1,
        "state": 2,
        "max_tasks": 1,
        "max_concurrent_tasks": 1,
        "sequence": 1,
        "reason": "test",
        "lease_ids": [lease.lease_id],
        "trajectory_ids": [item.trajectory_id for item in batch.items],
        "run": run_pb2.Run(
            run_id="other", recipe_yaml=recipe_text(name="other"), store_uri="file:///nowhere"
        ),
        "tasks": [
            task_pb2.Task(task_id="another", messages=[task_pb2.Message(role="user", content="2 + 2")])
        ],
        "failure": task_service_pb2.LeaseFailure(lease_id=lease.lease_id, reason="timeout"),
        "episode": node.episode(lease, 0),
        "version": version_pb2.Version(
            policy_id="solver", version=1, step=1, manifest_sha256=b"." * 32, trainer_epoch=1
        ),
    }
    session = [
        task_service_pb2.WorkRequest(
            credits=task_service_pb2.Credits(tasks=1, serving_versions={"solver": 0})
        ),
        task_service_pb2.WorkRequest(receipt=task_service_pb2.Receipt(lease_ids=[lease.lease_id])),
        task_service_pb2.WorkRequest(renewal=task_service_pb2.Renewal(lease_ids=[lease.lease_id])),
    ]
    spoken_by = {"node": node, "trainer": trainer, "trainer_once_claimed": trainer}
    return spoken_by[speaker].credential if speaker in spoken_by else "", known, session


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rpc", rpcs(*(f"dataflow.v1.{service}" for service in ATTRIBUTES)))
async def test_the_dataflow_server_answers_or_refuses_and_refused_calls_change_nothing(
    world: World, redis_url: str, rpc: str, count: int
) -> None:
    method = descriptor_pool.Default().FindMethodByName(rpc)
    credential, known, session = await known_of(world, read_contract(method).speaker)
    kind = message_factory.GetMessageClass(method.input_type)
    is_session = kind is task_service_pb2.WorkRequest
    hello = task_service_pb2.WorkRequest(
        hello=task_service_pb2.Hello(run_id="run", node_id="n1", incarnation=1)
    )
    kept = KeptState(redis_url)
    async with grpc.aio.insecure_channel(world.address) as channel:
        attack = Attack(
            channel=channel,
            method=method,
            good=[*session, hello] if is_session else [good_request(kind, known)],
            credential=credential,
            opening=[hello] if is_session else (),
            metrics=world.dataflow.metrics,
            seed=SEED,
        )
        found = await attack.run(count, serially=serially(count), kept=kept)
    kept.close()
    assert sum(found.values()) >= count
    assert found["INVALID_ARGUMENT"] > count // 50, found
    assert (await world.create_run(name="afterwards")).run_id == "afterwards"


class EchoingWorker:
    """A worker whose environment answers everything with nothing."""

    num_sessions = 0

    async def call(self, kind: object, payload: bytes) -> bytes:
        """An empty observation."""
        return b""

    def kill(self, why: str) -> None:
        """Nothing to kill."""


class EchoingPool:
    """Has always room."""

    num_ready = 1

    def take(self) -> EchoingWorker:
        """A worker."""
        return EchoingWorker()

    def give_back(self, worker: EchoingWorker) -> None:
        """Nothing to keep."""


def environment() -> tuple[Any, object]:
    """An environment service without processes."""
    settings = EnvironmentSettings(use="support.environments:Counter")
    sessions = Sessions(EchoingPool(), settings=settings, metrics=Metrics())  # type: ignore[arg-type]
    add = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
    return add, EnvironmentServicer(sessions)


def trainer() -> tuple[Any, object]:
    """The service of a trainer that has trained."""
    progress = Progress()
    progress.ended(Phase.FINISHED)
    servicer = TrainerServicer(progress, Controls(), run_id="run", policy_id="solver")
    return trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, servicer


KNOWN: Mapping[str, object] = COMMON | {
    "session_id": "s1" * 16,
    "environment": "Counter",
    "turn": 1,
    "action": task_pb2.Message(role="assistant", content="2"),
    "task": task_pb2.Task(task_id="t"),
    "holder": "n1" * 16,
    "reason": "test",
    "learning_rate": 1e-4,
}


async def attacked(
    registrations: Sequence[Any], rpc: str, count: int, *, kept: KeptState | None = None
) -> Counter[str]:
    """What a server of these answers to so many hostile requests."""
    method, metrics = descriptor_pool.Default().FindMethodByName(rpc), Metrics()
    good = [good_request(message_factory.GetMessageClass(method.input_type), KNOWN)]
    server = GrpcServer(registrations, settings=DaemonSettings(), metrics=metrics)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            attack = Attack(channel=channel, method=method, good=good, metrics=metrics, seed=SEED)
            found = await attack.run(count, serially=serially(count), kept=kept)
    finally:
        await server.stop(deadline_s=1.0)
    assert sum(found.values()) == count
    assert found["INVALID_ARGUMENT"] > count // 50, found
    return found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rpc", rpcs("raas.v1.EnvironmentService", "trainer.v1.TrainerService"))
async def test_environments_and_trainers_answer_or_refuse(rpc: str, count: int) -> None:
    served = environment() if "Environment" in rpc else trainer()
    found = await attacked([served], rpc, count)
    assert found["OK"] + found["NOT_FOUND"] + found["CONFLICT"] + found["FAILED_PRECONDITION"] > 0, found


class Raising(TrainerServicer):
    """Trips over some reasons."""

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        if request.reason:
            raise KeyError(request.reason)
        return pb.PauseResponse()


class Burning(TrainerServicer):
    """Thinks too long in the event loop."""

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        until_s = time.thread_time() + 1.1 * TOO_LONG_S
        while time.thread_time() < until_s:
            pass
        raise InvalidArgumentError("never again")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [(Raising, "answers INTERNAL"), (Burning, "CPU s still")])
async def test_an_attack_finds_what_it_looks_for(kind: type[TrainerServicer], words: str) -> None:
    servicer = kind(Progress(), Controls(), run_id="run", policy_id="solver")
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    with pytest.raises(AssertionError, match=words):
        await attacked([(add, servicer)], "astraflow.trainer.v1.TrainerService.Pause", 3)


class Scribbling(TrainerServicer):
    """Refuses, and has written something."""

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        with redis.Redis.from_url(self._run_id) as client:
            client.incr("scribbled")
        raise InvalidArgumentError("but too late")


@pytest.mark.slow
async def test_an_attack_finds_a_refused_call_that_writes(redis_url: str) -> None:
    servicer = Scribbling(Progress(), Controls(), run_id=redis_url, policy_id="solver")
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    kept = KeptState(redis_url)
    with pytest.raises(AssertionError, match="is refused and changes what is kept"):
        await attacked([(add, servicer)], "astraflow.trainer.v1.TrainerService.Pause", 3, kept=kept)
    kept.close()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rpc", rpcs("raas.v1.NodeService"))
async def test_a_node_answers_or_refuses(world: World, tmp_path: Path, rpc: str, count: int) -> None:
    await world.create_run()
    await world.trainer()
    async with local_node(world.address, tmp_path) as local:
        found = await attacked(registrations_of(local.node, begin_drain=lambda: None), rpc, count)
    assert found["OK"] > 0, found
