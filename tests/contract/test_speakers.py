"""As whom each rpc speaks, as docs/contracts.md says: whoever speaks as a node proves that it is this node."""

import re
from typing import Any

import grpc.aio
import pytest
from google.protobuf import descriptor_pool, message_factory

from astraflow._contract.rpcs import read_contract
from astraflow._status import from_rpc_error
from astraflow.keda.v1 import external_scaler_pb2
from astraflow.raas.v1 import environment_service_pb2, node_service_pb2
from astraflow.trainer.v1 import trainer_service_pb2
from astraflow_kit.identity.scopes import fields_of
from astraflow_kit.identity.speakers import METADATA
from support.dataflow_world import World
from support.source_tree import REPOSITORY

pytestmark = pytest.mark.slow

DESCRIBED = (external_scaler_pb2, environment_service_pb2, node_service_pb2, trainer_service_pb2)
"""Contracts that no other import here brings."""
SECTION = re.compile(r"^## (\w+\.\S+)$(.*?)(?=^## )", re.M | re.S)
ROW = re.compile(r"^\| `(\w+)`" + r"[^|]*\|" * 6 + r" ([^|]*?) \|", re.M)
TABLE = {
    f"/{service}/{rpc}": speaks_as
    for service, section in SECTION.findall((REPOSITORY / "docs" / "contracts.md").read_text())
    for rpc, speaks_as in ROW.findall(section)
}
WORDS = {
    "unspecified": "", "node": "node", "trainer": "trainer", "opens_node": "opens a node's session",
    "opens_trainer": "opens a trainer's session", "trainer_once_claimed": "trainer, once it has claimed",
}  # fmt: skip
OF_NODES = sorted(rpc for rpc, speaks_as in TABLE.items() if speaks_as == "node")
ADMITTED = ("", "")


def method_of(rpc: str) -> Any:
    _, service, name = rpc.split("/")
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]


def test_the_page_says_as_whom_every_rpc_speaks() -> None:
    assert len(TABLE) >= 51
    # A session of an environment is whose secret it is: tests/integration/test_environment_service.py.
    by_a_secret = {rpc: words for rpc, words in TABLE.items() if "EnvironmentService/" in rpc}
    assert all("`session_id`" in words for words in by_a_secret.values())
    others = {rpc: words for rpc, words in TABLE.items() if rpc not in by_a_secret}
    assert {rpc: WORDS[read_contract(method_of(rpc)).speaker] for rpc in others} == others


def test_who_may_be_a_node_or_a_trainer_proves_which_wherever_a_request_names_it() -> None:
    """A new rpc of nodes or trainers that takes an identity from its request is found here."""
    for rpc in TABLE:
        contract, request = read_contract(method_of(rpc)), method_of(rpc).input_type
        if contract.roles == {"rollout"} and fields_of(request, "node_id"):
            assert contract.speaker in ("node", "opens_node"), rpc
        if contract.roles & {"trainer"} and fields_of(request, "trainer_epoch"):
            assert "trainer" in contract.speaker, rpc


async def answer_to(world: World, rpc: str, session: str, **named: Any) -> tuple[str, str]:
    """Reason and metadata `reason` of a refusal for who it speaks as; `ADMITTED` where it went on to the request."""
    method = method_of(rpc)
    request: Any = message_factory.GetMessageClass(method.input_type)()
    for *holders, field in (path for name in named for path in fields_of(method.input_type, name)):
        holder = request
        for inner in holders:
            held = getattr(holder, inner.name)
            holder = held.add() if inner.is_repeated else held
        setattr(holder, field.name, named[field.name])
    shape = "_".join(
        "stream" if many else "unary" for many in (method.client_streaming, method.server_streaming)
    )
    serialized = {"request_serializer": type(request).SerializeToString}
    opened = getattr(world.client.channel, shape)(rpc, **serialized)
    metadata = ((METADATA, session),) if session else ()
    call = opened(iter([request]) if method.client_streaming else request, metadata=metadata, timeout=20)
    try:
        await (call.read() if method.server_streaming else call)
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error)
        why = typed.metadata.get("reason", "")
        return (typed.reason, why) if why in ("no_session", "wrong_session") else ADMITTED
    return ADMITTED


@pytest.mark.parametrize("rpc", OF_NODES)
async def test_a_node_is_who_its_session_says_and_nobody_else(world: World, rpc: str) -> None:
    await world.create_run(name="other")
    foreign = await world.node("n1")
    await world.create_run()
    own, another = await world.node("n1"), await world.node("n2")
    assert await answer_to(world, rpc, own.credential) == ADMITTED
    assert await answer_to(world, rpc, "") == ("UNAUTHENTICATED", "no_session")
    assert await answer_to(world, rpc, own.credential[:-1]) == ("UNAUTHENTICATED", "wrong_session")
    if "TrajectoryService" in rpc:
        return  # episodes are answered each: tests/integration/test_node_sessions.py
    for credential, named in (
        (another.credential, {"node_id": "n1"}),
        (foreign.credential, {"run_id": "run"}),
    ):
        assert await answer_to(world, rpc, credential, **named) == ("PERMISSION_DENIED", "wrong_session")
