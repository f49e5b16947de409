"""Calling the rpc of the dataflow server that takes a request, whichever it is: for tables of requests."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from astraflow._contract.rpcs import read_contract
from astraflow._status import from_rpc_error
from astraflow.client import typed_stream
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as trajectories
from astraflow.errors import AstraflowError
from support.dataflow_world import ATTRIBUTES, World

INVALID, MISSING, STATE = "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"
DENIED = "PERMISSION_DENIED"
CODES = {
    **dict.fromkeys((INVALID, "INVALID_RECIPE"), INVALID),
    **dict.fromkeys((STATE, "FENCED", "PLUGIN_FAILED", "POLICY_HELD", "VERSION_GAP"), STATE),
    MISSING: MISSING,
    DENIED: DENIED,
    "CONFLICT": "ALREADY_EXISTS",
    "UNKNOWN_VERSION": "UNAVAILABLE",
}
"""The status code of each reason, as the contract has it."""
COMMON = {"run_id": "run", "policy_id": "solver", "node_id": "n1", "incarnation": 1, "trainer_epoch": 1}


def request_of(kind: type[Message], **fields: Any) -> Message:
    """A request about run `run`, its policy, its node and the first epoch, as far as it has such fields."""
    known = {name: value for name, value in COMMON.items() if name in kind.DESCRIPTOR.fields_by_name}
    return kind(**(known | fields))


async def answer(world: World, request: Message, *, timeout_s: float = 20.0) -> object:
    """What the rpc of a request answers, as node `n1` where it has joined; the first response of a stream."""
    _lease(world, request)
    if isinstance(request, tasks.WorkRequest):
        return await in_a_session(world, request)
    service, method = rpc_of(request)
    client = world.speaking(credential_of(world, method))
    if isinstance(request, trajectories.PushRequest):
        call = client.open(client.trajectories.Push)
        await call.write(request)
        return await anext(typed_stream(call))
    rpc, metadata = getattr(getattr(client, service), method.name), client._metadata()
    # As a client of another make sends it: ours refuses what is out of bounds itself.
    if method.server_streaming:
        return await anext(typed_stream(rpc(request, metadata=metadata)), None)
    try:
        return await rpc(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def credential_of(world: World, method: Any) -> str:
    """Of who speaks in an rpc, the world's node `n1` or its trainer of `solver`; '' where nobody does, or is there."""
    speaker = read_contract(method).speaker
    known: Any = world.nodes.get("n1") if speaker == "node" else world.trainers.get("solver")
    return known.credential if known and speaker.startswith(("node", "trainer")) else ""


async def in_a_session(world: World, request: tasks.WorkRequest) -> object:
    """Everything a session answers that ends with this request."""
    client = world.speaking(world.nodes["n1"].credential if "n1" in world.nodes else "")

    async def requests() -> AsyncIterator[tasks.WorkRequest]:
        if request.WhichOneof("kind") != "hello":
            yield tasks.WorkRequest(hello=tasks.Hello())
        yield request

    return [item async for item in typed_stream(client.open(client.tasks.Work, requests()))]


def _lease(world: World, request: Message) -> None:
    """What the request says of leases is as if they had been given to the node."""
    if (node := world.nodes.get("n1")) is None:
        return
    if isinstance(request, trajectories.PushRequest):
        node.lease_all(request.episodes)
    elif isinstance(request, trajectories.PushEpisodeRequest):
        node.lease_all([request.episode])
    elif isinstance(request, tasks.FailTaskRequest):
        request.failure.lease_id = node.sealed(request.failure.lease_id)


def assert_refused(error: AstraflowError, reason: str, *, by_rpc: bool = True) -> None:
    """It has this reason and its status code, and the contract of the rpc that refused lists the reason."""
    assert (error.code, error.reason) == (CODES[reason], reason), error.message
    if not by_rpc:  # the message was too large to reach one
        return
    _, service, name = error.metadata["rpc"].split("/")
    method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    assert read_contract(method).may_answer(reason), f"{error.metadata['rpc']} does not list {reason}"


def rpc_of(request: Message) -> tuple[str, Any]:
    """The client's attribute for the service that takes a request, and the rpc."""
    for service, attribute in ATTRIBUTES.items():
        for method in served(service):
            if method.input_type is request.DESCRIPTOR:
                return attribute, method
    raise AssertionError(f"no rpc takes {request.DESCRIPTOR.full_name}")


def served(service: str) -> Iterator[Any]:
    """The rpcs of a service that this release provides."""
    for method in descriptor_pool.Default().FindServiceByName(f"astraflow.dataflow.v1.{service}").methods:
        if not read_contract(method).capability:
            yield method
