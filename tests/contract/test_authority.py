"""Who may call what: every rpc by every kind of caller on real servers, compared with docs/contracts.md."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Container
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor

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
from astraflow_kit.identity.sealing import NODE, Session, issue, new_lineage
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


def method_of(rpc: str) -> MethodDescriptor:
    """The descriptor of `/package.Service/Method`."""
    _, service, name = rpc.split("/")
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]


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
    await world.create_run()
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
                registrations, settings=settings, metrics=metrics, run_id=run_id, revoked=revoked,
                session_keys=world.dataflow.registry,
            )  # fmt: skip
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
    channel: grpc.aio.Channel,
    rpc: str,
    sent: str,
    refused: Container[str] = (UNKNOWN, DENIED),
    *,
    session: str = "",
) -> str:
    """The reason, one of `refused`, by which a call is refused; empty for any other answer. The call speaks as the
    holder of the credential `session`, if there is one.
    """
    method = method_of(rpc)
    request = message_factory.GetMessageClass(method.input_type)()
    for *holders, field in fields_of(method.input_type, "run_id"):
        holder: Any = request
        for inner in holders:
            held = getattr(holder, inner.name)
            holder = held.add() if inner.is_repeated else held
        setattr(holder, field.name, RUN_IN_THE_REQUEST)
    shape = "_".join(
        "stream" if many else "unary" for many in (method.client_streaming, method.server_streaming)
    )
    opened = getattr(channel, shape)(rpc, request_serializer=type(request).SerializeToString)
    asked = iter([request]) if method.client_streaming else request
    speaking = ((METADATA, session),) if session else ()
    metadata = (*speaking, *((("authorization", f"Bearer {sent}"),) if sent else ()))
    call = opened(asked, metadata=metadata, timeout=ANSWER_S)
    try:
        if method.server_streaming:
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        typed: AstraflowError = from_rpc_error(error)
        if typed.metadata.get("reason") == "wrong_session":
            return ""  # as whom it speaks was looked at after whether it may call
        return typed.reason if typed.reason in refused else ""
    return ""


async def test_every_rpc_is_open_to_just_those_whom_the_page_names(
    world: World,
    servers: dict[str, grpc.aio.Channel],
) -> None:
    own = Session(speaker=NODE, run_id=world.run_id, name="n1", number=1, lineage=new_lineage())
    session = issue(own, key=await world.dataflow.registry.seal_key(world.run_id))
    assert {rpc.split("/")[1] for rpc in TABLE} == set(servers)
    gaps = [
        f"{rpc} by {who}: {found or 'admitted'}, not {expected or 'admitted'}"
        for rpc in TABLE
        for who, (sent, expected) in callers(rpc).items()
        if (found := await refusal_of(servers[rpc.split("/")[1]], rpc, sent, session=session)) != expected
    ]
    assert gaps == []


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
