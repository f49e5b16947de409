"""Who may call what, and as whom: every rpc by every kind of caller, and with every kind of session, on real servers,
compared with docs/contracts.md and the contracts' options.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Container, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from astraflow._contract.rpcs import read_contract
from astraflow._status import from_rpc_error
from astraflow.errors import AstraflowError
from astraflow.raas.v1 import environment_service_pb2_grpc
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_environment.servicer import EnvironmentServicer
from astraflow_environment.sessions import Sessions
from astraflow_environment.settings import EnvironmentSettings
from astraflow_environment.workers import WorkerPool
from astraflow_kit.identity.scopes import fields_of
from astraflow_kit.identity.sealing import NODE, TRAINER, Session, issue, new_key, new_lineage
from astraflow_kit.identity.speakers import METADATA
from astraflow_kit.metrics import Metrics
from astraflow_kit.serve import GrpcServer
from astraflow_kit.settings import DaemonSettings, load
from astraflow_raas.server import registrations_of
from astraflow_trainer.controls import Controls
from astraflow_trainer.progress import Phase, Progress
from astraflow_trainer.servicer import TrainerServicer
from support.dataflow_world import World
from support.raas_node import local_node
from support.source_tree import REPOSITORY
from support.tls import Authority
from support.tokens import keys_file, token

pytestmark = pytest.mark.slow

ANSWER_S = 20.0
ROLES = ("rollout", "trainer", "operator", "viewer", "agent")
UNKNOWN, DENIED, UNREACHED = "UNAUTHENTICATED", "PERMISSION_DENIED", "UNAVAILABLE"
SCALER = "externalscaler.ExternalScaler"
PAST_S = time.time() - 3600
SECTION = re.compile(r"^## (\w+\.\S+)$(.*?)(?=^## )", re.M | re.S)
ROW = re.compile(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|", re.M)
TABLE = {
    f"/{service}/{rpc}": (set(roles.split(", ")), runs)
    for service, section in SECTION.findall((REPOSITORY / "docs" / "contracts.md").read_text())
    for rpc, roles, runs in ROW.findall(section)
}
RUN_IN_THE_REQUEST, SERVED_RUN = "nowhere", "run"
RUN_NAMED: Mapping[str, object] = {"run_id": RUN_IN_THE_REQUEST}
RUN_SERVED: Mapping[str, object] = {"run_id": SERVED_RUN}


def method_of(rpc: str) -> MethodDescriptor:
    """The descriptor of `/package.Service/Method`."""
    _, service, name = rpc.split("/")
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]


def kind_of(rpc: str) -> str:
    """Who speaks in a call, where anybody does."""
    return TRAINER if "trainer" in read_contract(method_of(rpc)).speaker else NODE


def test_the_page_lists_every_rpc() -> None:
    assert len(TABLE) >= 51
    for rpc, (roles, _) in TABLE.items():
        assert read_contract(method_of(rpc)).roles == roles, rpc


def test_every_request_says_which_run_it_is_about_or_the_contract_does() -> None:
    for rpc, (roles, runs) in TABLE.items():
        named = fields_of(method_of(rpc).input_type, "run_id")
        assert bool(named) == (runs == "named"), rpc
        assert bool(runs) != (roles == {"anyone"}), rpc


def callers(rpc: str) -> dict[str, tuple[str, str]]:
    """The token of each kind of caller, and the code that refuses it; none where it may call."""
    roles, runs = TABLE[rpc]
    open_to_all = roles == {"anyone"}
    good = next(iter(roles & set(ROLES)), "viewer")
    refused = {
        "anonymous": ("", UNKNOWN),
        "expired": (token("late", good, nbf=PAST_S, exp=PAST_S), UNKNOWN),
        "revoked": (token("revoked", good), UNKNOWN),
        "wrong audience": (token("stray", good, aud="elsewhere"), UNKNOWN),
        "other run": (
            token("tenant", good, runs=["other"]),
            DENIED if runs in ("named", "served", "all") else "",
        ),
    }
    table = {role: (token(role, role), "" if role in roles else DENIED) for role in ROLES} | refused
    return {who: (sent, "" if open_to_all else code) for who, (sent, code) in table.items()}


@pytest.fixture
async def servers(world: World, tmp_path: Path) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """Service → a channel to a server of it that asks for tokens, one of which is revoked."""
    await world.create_run(policies=("solver", "critic"))
    await world.dataflow.revoked_tokens.revoke("jti-revoked")
    progress = Progress()
    progress.ended(Phase.FINISHED)
    trainer = TrainerServicer(progress, Controls(), run_id=SERVED_RUN, policy_id="solver")
    metrics, environment = Metrics(), EnvironmentSettings(use="support.environments:Counter")
    sessions = Sessions(WorkerPool(environment, metrics=metrics), settings=environment, metrics=metrics)
    settings = DaemonSettings(token_keys_file=keys_file(tmp_path))
    async with local_node(world.address, tmp_path) as local, AsyncExitStack() as stack:
        parts: list[tuple[list[Any], str]] = [
            (world.dataflow.registrations(), ""),
            (registrations_of(local.node, begin_drain=lambda: None), SERVED_RUN),
            ([(trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, trainer)], SERVED_RUN),
            (
                [
                    (
                        environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server,
                        EnvironmentServicer(sessions),
                    )
                ],
                "",
            ),
        ]
        found = {}
        for registrations, run_id in parts:
            revoked = world.dataflow.revoked_tokens.seen
            server = GrpcServer(
                registrations,
                settings=settings,
                metrics=metrics,
                run_id=run_id,
                session_keys=None if run_id else world.dataflow.registry,
                revoked=revoked,
            )
            await server.start()
            stack.push_async_callback(server.stop, deadline_s=0.1)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
            found |= dict.fromkeys(server.services, channel)
        scaler = await stack.enter_async_context(scaler_of(world, tmp_path))
        yield found | {SCALER: await stack.enter_async_context(scaler.channel(scaler.known))}


@dataclass(frozen=True)
class AnsweringKeda:
    """The listener for KEDA, and an authority whose clients it knows."""

    address: str
    known: Authority

    def channel(self, shown: Authority | None) -> grpc.aio.Channel:
        """A channel that shows a client's certificate of an authority, or none."""
        client = shown.client() if shown else None
        pair = (client.key.read_bytes(), client.certificate.read_bytes()) if client else (None, None)
        return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(self.known.pem, *pair))


@asynccontextmanager
async def scaler_of(world: World, folder: Path) -> AsyncIterator[AnsweringKeda]:
    """The scaler of a server that asks for tokens elsewhere."""
    known = Authority.create(folder / "known")
    pair = known.server()
    files = {
        "tls_cert_file": pair.certificate,
        "tls_key_file": pair.key,
        "token_keys_file": keys_file(folder),
    }
    listening = {"scaler_port": 0, "scaler_client_ca_file": known.folder / "ca.pem"}
    world.dataflow.settings = load(DataflowServerSettings, {"redis": "redis://x", **files, **listening})
    listener = world.dataflow.scaler(ending=asyncio.Event())
    assert listener is not None
    await listener.start()
    try:
        yield AnsweringKeda(listener.address, known)
    finally:
        await listener.stop(deadline_s=0.1)


async def refusal_of(
    channel: grpc.aio.Channel, rpc: str, sent: str, refused: Container[str] = (UNKNOWN, DENIED)
) -> str:
    """The reason, one of `refused`, by which a call is refused; empty for any other answer."""
    own = Session(speaker=kind_of(rpc), run_id=RUN_IN_THE_REQUEST, name="n1", number=1, lineage=new_lineage())
    metadata = {METADATA: issue(own, key=new_key())} | ({"authorization": f"Bearer {sent}"} if sent else {})
    answered = await answer_of(channel, rpc, metadata)
    return answered.reason if isinstance(answered, AstraflowError) and answered.reason in refused else ""


async def answer_of(
    channel: grpc.aio.Channel,
    rpc: str,
    metadata: Mapping[str, str],
    *,
    named: Mapping[str, object] = RUN_NAMED,
) -> Message | AstraflowError | None:
    """What a call with this metadata answers, the first response of a stream; its request names these where it can."""
    method = method_of(rpc)
    request = message_factory.GetMessageClass(method.input_type)()
    paths = [(path, value) for name, value in named.items() for path in fields_of(method.input_type, name)]
    for (*holders, field), value in paths:
        holder: Any = request
        for inner in holders:
            held = getattr(holder, inner.name)
            holder = (held[0] if held else held.add()) if inner.is_repeated else held
        setattr(holder, field.name, value)
    shape = "_".join(
        "stream" if many else "unary" for many in (method.client_streaming, method.server_streaming)
    )
    opened = getattr(channel, shape)(
        rpc,
        request_serializer=type(request).SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    asked = iter([request]) if method.client_streaming else request
    call = opened(asked, metadata=tuple(metadata.items()), timeout=ANSWER_S)
    try:
        if not method.server_streaming:
            answer: Message = await call
            return answer
        first: Message = await call.read()
        call.cancel()
        return first if first is not grpc.aio.EOF else None
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


async def test_every_rpc_is_open_to_just_those_whom_the_page_names(
    servers: dict[str, grpc.aio.Channel],
) -> None:
    assert {rpc.split("/")[1] for rpc in TABLE} == set(servers)
    gaps = [
        f"{rpc} by {who}: {found or 'admitted'}, not {expected or 'admitted'}"
        for rpc in TABLE
        for who, (sent, expected) in callers(rpc).items()
        if (found := await refusal_of(servers[rpc.split("/")[1]], rpc, sent)) != expected
    ]
    assert gaps == []


AS_WHOM = (
    "its own session",
    "another session of the run",
    "a session of another run",
    "a node or trainer by name alone",
)


def refused_as(rpc: str, whom: str) -> str:
    """How a call is refused that names one node or trainer and shows what `whom` has."""
    speaker = read_contract(method_of(rpc)).speaker
    if speaker == "unspecified" or whom == AS_WHOM[0]:
        return ""
    return "no_session" if whom == AS_WHOM[3] and not speaker.startswith("opens") else "wrong_session"


@dataclass(frozen=True)
class Shown:
    """What one node and one trainer are, and the credentials that calls in their names show."""

    named: Mapping[str, Mapping[str, object]]
    """By who speaks, what requests say of it."""
    credentials: Mapping[str, Mapping[str, str]]
    """By whom, by who speaks."""


async def shown_in(world: World) -> Shown:
    """Sessions of two runs."""
    await world.create_run(name="elsewhere")
    found: dict[str, dict[str, str]] = {AS_WHOM[3]: {}}
    for whom, run_id, node_id, policy_id in (
        (AS_WHOM[2], "elsewhere", "n1", "solver"),
        (AS_WHOM[1], SERVED_RUN, "n1-2", "critic"),
        (AS_WHOM[0], SERVED_RUN, "n1", "solver"),
    ):
        world.run_id = run_id
        joined = await world.join(node_id, max_concurrent_tasks=1)
        trainer = await world.trainer(policy_id, publish_first=False)
        found[whom] = {"node": joined.session, "trainer": trainer.credential}
    fitting = {"max_concurrent_tasks": 1, "task_id": "t", "sequence": 1}
    node = {"node_id": "n1", "incarnation": joined.incarnation} | fitting
    claim = {"policy_id": "solver", "trainer_epoch": trainer.epoch, "held_epoch": trainer.epoch}
    return Shown({NODE: {**RUN_SERVED, **node}, TRAINER: {**RUN_SERVED, **claim}}, found)


async def test_every_rpc_speaks_as_just_whom_its_credential_proves(
    world: World, servers: dict[str, grpc.aio.Channel]
) -> None:
    shown, gaps = await shown_in(world), []
    for rpc, (roles, _) in TABLE.items():
        role = next((role for role in ROLES if role in roles), "viewer")
        authorized = {} if roles == {"anyone"} else {"authorization": f"Bearer {token('n1', role)}"}
        for whom in reversed(AS_WHOM):
            session = shown.credentials[whom].get(kind_of(rpc))
            metadata = authorized | ({METADATA: session} if session else {})
            answer = await answer_of(
                servers[rpc.split("/")[1]], rpc, metadata, named=shown.named[kind_of(rpc)]
            )
            if (found := session_refusal(answer)) != refused_as(rpc, whom):
                gaps.append(
                    f"{rpc} as {whom}: {found or 'admitted'}, not {refused_as(rpc, whom) or 'admitted'}"
                )
    assert not gaps, "\n".join(gaps)


def session_refusal(answer: Message | AstraflowError | None) -> str:
    """Why a call, or the episode in it, was not taken as from whom it names; empty when it was."""
    if isinstance(answer, AstraflowError):
        why = answer.metadata.get("reason", "")
    else:
        results = getattr(answer, "results", None) or [getattr(answer, "result", None)]
        why = getattr(results[0], "reason", "")
    return why if why in ("no_session", "wrong_session") else ""


async def test_the_scaler_is_open_to_certificates_of_its_authority_alone(
    world: World, tmp_path: Path
) -> None:
    rpcs = [rpc for rpc in TABLE if rpc.split("/")[1] == SCALER]
    stranger, answers = Authority.create(tmp_path / "stranger"), {}
    async with scaler_of(world, tmp_path) as scaler:
        for who, shown in {"known": scaler.known, "stranger": stranger, "nobody": None}.items():
            async with scaler.channel(shown) as channel:
                asked = [
                    await refusal_of(channel, rpc, token("op", "operator"), (UNREACHED,)) for rpc in rpcs
                ]
                answers[who] = set(asked)
    assert answers == {"known": {""}, "stranger": {UNREACHED}, "nobody": {UNREACHED}}
