"""One worker process, `python -m astraflow_environment.worker FD SPECIFICATION`: the plug-in, loaded once, and the
sessions that live in it.

Invariant: whatever an environment raises is answered in words and touches no other session; what it prints goes to
stderr, and what it does to `sys.argv` or the working folder stays in this process. Started by `workers`.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from google.protobuf.message import Message as Proto

from astraflow.chat import message_from_proto, observation_to_proto, task_from_proto, tools_to_proto
from astraflow.errors import PluginError
from astraflow.plugins import Environment, MissingCapability
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_environment.frames import Frame, Kind, read_frame, write_frame
from astraflow_kit.plugins import RecipeSource, describe, make


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Which plug-in a worker loads."""

    use: str
    settings: str
    recipe: str

    def dump(self) -> str:
        """As one argument of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Self:
        """What `dump` wrote."""
        return cls(**json.loads(text))

    def maker(self) -> Callable[[], Environment]:
        """Make one to prove that it can be made, and return what makes more. Raises PluginError."""
        plugin = PluginSettings.model_validate({"use": self.use, "with": json.loads(self.settings)})
        folder = Path(self.recipe) if self.recipe else None
        source = RecipeSource(name="--use", folder=folder)
        spare: list[Environment] = [make(plugin, protocol=Environment, source=source)]
        return lambda: spare.pop() if spare else make(plugin, protocol=Environment, source=source)


class Worker:
    """Answers calls until the service closes the socket."""

    def __init__(
        self,
        make_environment: Callable[[], Environment],
        *,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._make = make_environment
        self._reader = reader
        self._writer = writer
        self._sessions: dict[str, Environment] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Return when the service is gone."""
        write_frame(self._writer, Frame(Kind.READY))
        while True:
            try:
                frame = await read_frame(self._reader)
            except EOFError:
                return
            task = asyncio.create_task(self._answer(frame))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _answer(self, call: Frame) -> None:
        actions = {Kind.RESET: self._reset, Kind.STEP: self._step, Kind.CLOSE: self._close}
        try:
            answer = Frame(
                Kind.ANSWER, call.call, (await actions[call.kind](call.payload)).SerializeToString()
            )
        except MissingCapability as error:
            answer = Frame(Kind.MISSING, call.call, str(error).encode())
        except Exception as error:  # noqa: BLE001 - an environment may raise anything
            answer = Frame(Kind.RAISED, call.call, describe(error).encode())
        write_frame(self._writer, answer)
        await self._writer.drain()

    async def _reset(self, payload: bytes) -> Proto:
        request = contract.ResetRequest.FromString(payload)
        environment = self._sessions[request.session_id] = self._make()
        seen = await environment.reset(task_from_proto(request.task))
        return contract.ResetResponse(
            observation=observation_to_proto(seen), tools=tools_to_proto(seen.tools)
        )

    async def _step(self, payload: bytes) -> Proto:
        request = contract.StepRequest.FromString(payload)
        seen = await self._sessions[request.session_id].step(message_from_proto(request.action))
        return contract.StepResponse(turn=request.turn, observation=observation_to_proto(seen))

    async def _close(self, payload: bytes) -> Proto:
        environment = self._sessions.pop(contract.CloseRequest.FromString(payload).session_id, None)
        if environment is not None:
            await environment.close()
        return contract.CloseResponse()


async def serve(descriptor: int, specification: Specification) -> int:
    """Load the plug-in and work; the exit status."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    try:
        make_environment = specification.maker()
    except PluginError as error:
        write_frame(writer, Frame(Kind.MISSING, payload=error.message.encode()))
        await writer.drain()
        return 2
    await Worker(make_environment, reader=reader, writer=writer).serve()
    return 0


def _main(descriptor: str, specification: str) -> int:
    os.dup2(2, 1)  # what environments print belongs in the log
    status = asyncio.run(serve(int(descriptor), Specification.load(specification)))
    sys.stderr.flush()
    os._exit(status)  # threads that an environment left behind must not keep the process


if __name__ == "__main__":
    _main(*sys.argv[1:])
