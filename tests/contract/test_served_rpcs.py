"""Every rpc of every daemon is what its contract says: the one it works, the other names what is missing; every
refusal has details, and only reasons that callers were told of.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_database, descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodOptions
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from astraflow._contract.rpcs import read_contract
from astraflow._status import from_status
from astraflow.connecting.compatibility import CONTRACT_VERSION
from astraflow.errors import ERRORS_BY_REASON, EVERY_RPC, AstraflowError, UnimplementedError
from astraflow.options.v1 import options_pb2
from astraflow.raas.v1 import environment_service_pb2_grpc
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from astraflow_environment.servicer import EnvironmentServicer
from astraflow_environment.sessions import Sessions
from astraflow_environment.settings import EnvironmentSettings
from astraflow_environment.workers import WorkerPool
from astraflow_kit.metrics import Metrics
from astraflow_kit.serve import GrpcServer
from astraflow_kit.settings import DaemonSettings
from astraflow_raas.server import registrations_of
from astraflow_trainer.controls import Controls
from astraflow_trainer.progress import Phase, Progress
from astraflow_trainer.servicer import TrainerServicer
from support.dataflow_world import World
from support.raas_node import local_node
from support.source_tree import REPOSITORY

pytestmark = pytest.mark.slow

DESCRIPTORS = REPOSITORY / "clients" / "descriptors" / "astraflow.binpb"
ANSWER_S = 20.0
SERVED = (
    *("dataflow.v1.AdminService", "dataflow.v1.BatchService", "dataflow.v1.EvaluationService"),
    *("dataflow.v1.RunService", "dataflow.v1.SampleService"),
    *("dataflow.v1.TaskService", "dataflow.v1.TrajectoryService", "dataflow.v1.VersionService"),
    *("raas.v1.EnvironmentService", "raas.v1.NodeService", "trainer.v1.TrainerService"),
)


@pytest.fixture
async def addresses(world: World, tmp_path: Path) -> AsyncIterator[list[str]]:
    """A dataflow server with one run, a node of it, and a trainer that has trained."""
    await world.create_run()
    await world.trainer()
    progress = Progress()
    progress.ended(Phase.FINISHED)
    trainer = TrainerServicer(progress, Controls(), run_id=world.run_id, policy_id="solver")
    add_trainer = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    async with local_node(world.address, tmp_path) as local:
        settings, metrics = EnvironmentSettings(use="support.environments:Counter"), Metrics()
        sessions = Sessions(WorkerPool(settings, metrics=metrics), settings=settings, metrics=metrics)
        add_environment = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
        others = [
            registrations_of(local.node, begin_drain=lambda: None),
            [(add_trainer, trainer)],
            [(add_environment, EnvironmentServicer(sessions))],
        ]
        servers = [GrpcServer(other, settings=DaemonSettings(), metrics=Metrics()) for other in others]
        for server in servers:
            await server.start()
        yield [world.address, *(server.address for server in servers)]
        for server in servers:
            await server.stop(deadline_s=1.0)


async def reflected(channel: grpc.aio.Channel, **question: Any) -> reflection_pb2.ServerReflectionResponse:
    """What reflection answers."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
    asked = reflection_pb2.ServerReflectionRequest(**question)
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]))]
    assert not answers[0].error_response.error_message, question
    return answers[0]


async def services_of(channel: grpc.aio.Channel) -> list[str]:
    """What reflection lists, without gRPC's own."""
    listed = (await reflected(channel, list_services="")).list_services_response
    return [service.name for service in listed.service if service.name.startswith("astraflow.")]


async def files_of(channel: grpc.aio.Channel, symbol: str) -> dict[str, FileDescriptorProto]:
    """The file that declares `symbol` and all it imports, asked of reflection as tools do that know nothing."""
    answer = await reflected(channel, file_containing_symbol=symbol)
    found: dict[str, FileDescriptorProto] = {}
    waiting = list(answer.file_descriptor_response.file_descriptor_proto)
    while waiting:
        file = FileDescriptorProto.FromString(waiting.pop())
        found[file.name] = file
        for name in set(file.dependency) - set(found):
            answer = await reflected(channel, file_by_filename=name)
            waiting += answer.file_descriptor_response.file_descriptor_proto
    return found


def request_of(method: MethodDescriptor) -> bytes:
    """An empty request, of a run that does not exist where the rpc has one: every rpc has something to say to it."""
    request = message_factory.GetMessageClass(method.input_type)()
    if "run_id" in method.input_type.fields_by_name:
        request.run_id = "nowhere"  # type: ignore[attr-defined]
    return request.SerializeToString()


async def answer_to(channel: grpc.aio.Channel, method: MethodDescriptor) -> AstraflowError | None:
    """What one call answers: its typed error, or None when it worked. Fails when an error has no details."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            stream = channel.stream_stream(path)(timeout=ANSWER_S)
            await stream.write(request_of(method))
            await stream.read()
        elif method.server_streaming:
            await channel.unary_stream(path)(request_of(method), timeout=ANSWER_S).read()
        else:
            await channel.unary_unary(path)(request_of(method), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return with_details(error, path=path)
    return None


def with_details(error: grpc.aio.AioRpcError, *, path: str) -> AstraflowError:
    """The typed error, which must have come with details of ours."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, f"{path} answers {error.code()} {error.details()!r} without details"
    typed = from_status(status)
    assert typed is not None, f"{path} answers {status} without our ErrorInfo"
    return typed


async def test_every_rpc_that_a_daemon_serves_answers_as_its_contract_says(addresses: list[str]) -> None:
    served: list[str] = []
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            names = await services_of(channel)
            served += names
            for name in names:
                for method in descriptor_pool.Default().FindServiceByName(name).methods:
                    contract, answer = read_contract(method), await answer_to(channel, method)
                    reason, path = answer.reason if answer else "OK", method.full_name
                    assert (reason == UnimplementedError.reason) == bool(contract.capability), path
                    if answer is not None:
                        assert contract.may_answer(reason), f"{path} answers {reason}: {answer}"
                        assert answer.metadata["rpc"] == f"/{name}/{method.name}"
                        assert "not implemented" not in answer.message
                        assert answer.metadata.get("capability", "") == contract.capability
    assert sorted(served) == [f"astraflow.{name}" for name in SERVED]


async def test_reflection_serves_the_contracts_with_our_options(addresses: list[str]) -> None:
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            for name in await services_of(channel):
                files = await files_of(channel, name)
                assert "astraflow/options/v1/options.proto" in files
                database = descriptor_database.DescriptorDatabase()
                for file in files.values():
                    database.Add(file)
                served = descriptor_pool.DescriptorPool(database).FindServiceByName(name)
                assert served.methods
                for method in served.methods:
                    known = descriptor_pool.Default().FindMethodByName(method.full_name)
                    options = MethodOptions.FromString(method.GetOptions().SerializeToString())
                    assert options == known.GetOptions(), method.full_name
                    assert options.Extensions[options_pb2.roles], method.full_name


@pytest.mark.parametrize("schema", [[], ["--schema", str(DESCRIPTORS)]], ids=["reflection", "descriptors"])
async def test_a_tool_that_knows_nothing_of_us_can_call(world: World, schema: list[str]) -> None:
    url = f"http://{world.address}/astraflow.dataflow.v1.AdminService/GetServerInfo"
    options = ["--http2-prior-knowledge", "--protocol", "grpc", *schema]
    command = [str(Path(sys.executable).parent / "buf"), "curl", *options, url]
    done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["server"]["contractVersion"] == CONTRACT_VERSION


def test_the_published_descriptors_hold_our_options_comments_and_all_imports() -> None:
    published = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    files = {file.name: file for file in published.file}
    assert {name for file in published.file for name in file.dependency} <= set(files)
    admin = files["astraflow/dataflow/v1/admin_service.proto"]
    assert admin.service[0].method[0].options.Extensions[options_pb2.roles] == [options_pb2.ROLE_ANYONE]
    comments = [place.leading_comments for place in admin.source_code_info.location]
    assert any("Says who the server is" in comment for comment in comments)


async def test_a_service_of_another_daemon_is_not_here(addresses: list[str]) -> None:
    method = descriptor_pool.Default().FindServiceByName("astraflow.trainer.v1.TrainerService").methods[0]
    async with grpc.aio.insecure_channel(addresses[0]) as channel:
        answer = await answer_to(channel, method)
    assert isinstance(answer, UnimplementedError)
    assert "astraflow.dataflow.v1.RunService" in answer.message


@pytest.mark.parametrize("name", SERVED)
def test_the_options_of_a_service_are_whole_and_its_reasons_are_errors_of_ours(name: str) -> None:
    service = descriptor_pool.Default().FindServiceByName(f"astraflow.{name}")
    common = list(service.GetOptions().Extensions[options_pb2.common_errors].reasons)
    for method in service.methods:
        options = method.GetOptions().Extensions
        listed = [*common, *options[options_pb2.errors].reasons]
        assert {*listed, *EVERY_RPC} <= set(ERRORS_BY_REASON), f"{method.full_name}: {listed}"
        assert len(set(listed)) == len(listed), f"{method.full_name} lists a reason twice: {listed}"
        assert not set(listed) & set(EVERY_RPC), f"{method.full_name}: every rpc may answer these"
        missing = options[options_pb2.missing]
        assert bool(missing.capability) == bool(missing.instead), method.full_name
        assert not missing.instead.endswith("."), method.full_name
