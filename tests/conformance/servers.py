"""The servers that cases talk to: the dataflow server, in the test's loop or as a process, and one with a script."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from support.dataflow_process import DataflowProcess
from support.dataflow_world import World

Json = Any
_PREFIX = "/astraflow.dataflow.v1."
_DETAILS = "grpc-status-details-bin"


@dataclass
class WorldServer:
    """The dataflow server in the test's loop."""

    world: World
    variables: Mapping[str, Json] = field(default_factory=dict)
    """What cases may say of it."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.world.address

    async def control(self, step: Mapping[str, Json]) -> Json:
        """It only serves."""
        raise AssertionError(f"nothing to ask of this server: {step}")


@dataclass
class ProcessServer:
    """The dataflow server as a process: `kill` and `start`."""

    process: DataflowProcess

    @property
    def address(self) -> str:
        """Where it listens, also after a restart."""
        return self.process.address

    async def control(self, step: Mapping[str, Json]) -> Json:
        """Kill it, or start it again."""
        do = {"kill": self.process.kill, "start": self.process.start}[step["server"]]
        await asyncio.to_thread(do)
        return {}


@dataclass
class ScriptedServer:
    """Answers every rpc from a script, the last answer again and again; counts calls and keeps their metadata."""

    address: str = ""
    script: deque[Mapping[str, Json]] = field(default_factory=deque)
    calls: Counter[str] = field(default_factory=Counter)
    metadata: dict[str, str] = field(default_factory=dict)

    async def control(self, step: Mapping[str, Json]) -> Json:
        """Take a script, or say what was seen."""
        if step["server"] == "script":
            self.script = deque(step["answers"])
        return {"calls": dict(self.calls), "metadata": self.metadata}

    def service(self, details: Any) -> Any:
        """The handler of whatever rpc is called; bytes in, bytes out."""
        rpc = details.method.removeprefix(_PREFIX)

        async def handle(_request: bytes, context: Any) -> bytes:
            self.calls[rpc] += 1
            self.metadata = {
                name: value for name, value in context.invocation_metadata() if name != "user-agent"
            }
            answer = self.script.popleft() if len(self.script) > 1 else self.script[0]
            return await scripted(answer, rpc, context)

        return grpc.unary_unary_rpc_method_handler(handle)


async def scripted(answer: Mapping[str, Json], rpc: str, context: Any) -> bytes:
    """Answer as the script says. Aborts the call for a status."""
    if "hangs_s" in answer:
        await asyncio.sleep(answer["hangs_s"])
    if "bytes" in answer:
        return base64.b64decode(answer["bytes"])
    if "status" in answer:
        written = answer["status"]
        code = grpc.StatusCode[written["code"]]
        trailers = ((_DETAILS, status_of(written, code).SerializeToString()),) if "reason" in written else ()
        await context.abort(code, written.get("message", ""), trailers)
    service, name = rpc.split("/")
    method = Default().FindServiceByName(f"astraflow.dataflow.v1.{service}").methods_by_name[name]
    written = answer.get("message", {})
    if "padded_to" in answer:
        written = {"run": {"runId": "padded", "recipeYaml": "x" * answer["padded_to"]}}
    message = ParseDict(written, GetMessageClass(method.output_type)())
    return bytes(message.SerializeToString())


def status_of(written: Mapping[str, Json], code: grpc.StatusCode) -> status_pb2.Status:
    """The rich status that a row describes."""
    info = error_details_pb2.ErrorInfo(
        reason=written["reason"],
        domain=written.get("domain", "astraflow"),
        metadata=written.get("metadata", {}),
    )
    details = [info]
    if "retry_after_s" in written:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(written["retry_after_s"] * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code.value[0], message=written.get("message", ""), details=packed)


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    """A scripted server on a free port."""
    server, scripted_by = grpc.aio.server(), ScriptedServer()
    server.add_generic_rpc_handlers((scripted_by,))  # type: ignore[arg-type]  # it has the one method of a handler
    scripted_by.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield scripted_by
    finally:
        await server.stop(None)
