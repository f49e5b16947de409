"""The reading rpcs over HTTP, for the page: the same servicers, bounds and roles as over gRPC, so there is one truth.

`GET /api/rpc/AdminService/Status?request={"run_id": "…"}` answers what the rpc answers, as the commands print it with
`--json`; a streaming rpc answers server-sent events. Called by `site`; it changes nothing, so a forged request of
another web site does neither.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from google.protobuf import descriptor_pool, json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from astraflow._contract.bounds import admit
from astraflow._contract.rpcs import RpcContract
from astraflow.commands.wording import as_json
from astraflow.errors import AstraflowError, InvalidArgumentError, NotFoundError
from astraflow.options.v1 import options_pb2
from astraflow_kit.identity.gate import Gate, caller
from astraflow_kit.rpc_contracts import Registration, served_contracts
from astraflow_kit.serve import Context

_NO_CONTEXT = cast("Context", None)
"""Reading servicers do not look at it."""
STREAM_S = 60.0
"""After this a stream ends and the browser asks again, with the token that it has then."""
_BEAT_S = 5.0
"""A comment is sent this often, so that both sides see a connection that is dead."""


@dataclass(frozen=True)
class ReadingRpc:
    """An rpc that changes nothing and that viewers may call."""

    name: str
    contract: RpcContract
    request_type: type[Message]
    call: Callable[[Message, Context], Any]
    streams: bool


class Gateway:
    """Calls reading rpcs for the caller of the page."""

    def __init__(self, registrations: Sequence[Registration]) -> None:
        self._rpcs = {rpc.name.removeprefix("/"): rpc for rpc in _reading(registrations)}
        contracts = {rpc.name: rpc.contract for rpc in self._rpcs.values()}
        self._gate = Gate(contracts, verifier=None)

    @property
    def names(self) -> list[str]:
        """`Service/Method` of each rpc."""
        return [name.rpartition(".")[2] for name in self._rpcs]

    def find(self, service: str, method: str) -> ReadingRpc:
        """Return an rpc. Raises NotFoundError for one that is none, or that is not for reading."""
        for name, rpc in self._rpcs.items():
            if name.endswith(f".{service}/{method}"):
                return rpc
        raise NotFoundError(
            f"there is no reading rpc {service}/{method}; the page has {', '.join(self.names)}"
        )

    def request(self, rpc: ReadingRpc, text: str) -> Message:
        """Read a request from JSON, and hold it against bounds and token. Raises InvalidArgumentError,
        PermissionError_.
        """
        self._gate.allow(rpc.name, caller())
        try:
            message = json_format.Parse(text or "{}", rpc.request_type())
        except json_format.ParseError as error:
            raise InvalidArgumentError(
                f"`request` is no {rpc.request_type.DESCRIPTOR.name}: {error}"
            ) from error
        self._gate.narrow(rpc.name, message)
        admit(message)
        return message

    async def ask(self, service: str, method: str, request: Message) -> Message:
        """Call an rpc with a request that is made here. Raises what it raises, and PermissionError_."""
        rpc = self.find(service, method)
        self._gate.allow(rpc.name, caller())
        self._gate.narrow(rpc.name, request)
        admit(request)
        return cast("Message", await rpc.call(request, _NO_CONTEXT))

    async def answer(self, rpc: ReadingRpc, request: Message) -> bytes:
        """Call a unary rpc; JSON. Raises what it raises."""
        message = await rpc.call(request, _NO_CONTEXT)
        return await asyncio.to_thread(lambda: json.dumps(as_json(message)).encode())

    async def events(
        self, rpc: ReadingRpc, request: Message, *, hello: str, ending: asyncio.Event
    ) -> AsyncIterator[str]:
        """Call a streaming rpc; server-sent events: `hello`, each message, `refused` for an error, `bye`; `beat` in
        between, so that a page tells a quiet run from a server that hangs.
        """
        yield _event("hello", hello)
        try:
            async with aclosing(_until(rpc.call(request, _NO_CONTEXT), ending=ending)) as messages:
                async for message in messages:
                    yield _event("beat", "{}") if message is None else _message(message)
        except AstraflowError as error:
            yield _event("refused", json.dumps(refusal(error)))
        yield _event("bye", "{}")


def refusal(error: AstraflowError) -> dict[str, Any]:
    """Return an error as JSON: slug, text, and what programs go by."""
    return {"error": error.reason, "message": error.message, "metadata": error.metadata}


def _message(message: Message) -> str:
    return _event("message", json.dumps(as_json(message)))


def _event(kind: str, data: str) -> str:
    return f"event: {kind}\ndata: {data}\n\n"


async def _until(source: AsyncIterator[Message], *, ending: asyncio.Event) -> AsyncGenerator[Message | None]:
    """Yield what `source` does, None where nothing came for a while, until it ends, `ending` is set or time is over."""
    ends_at = asyncio.get_running_loop().time() + STREAM_S
    over = asyncio.ensure_future(ending.wait())
    following: asyncio.Future[Message] | None = None
    try:
        while (left_s := ends_at - asyncio.get_running_loop().time()) > 0:
            following = following or asyncio.ensure_future(partial(anext, source)())
            await asyncio.wait(
                {following, over}, timeout=min(_BEAT_S, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if over.done():
                return
            if not following.done():
                yield None
                continue
            try:
                message = following.result()
            except StopAsyncIteration:
                return
            following = None
            yield message
    finally:
        over.cancel()
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if hasattr(source, "aclose"):
            await source.aclose()


def _reading(registrations: Sequence[Registration]) -> list[ReadingRpc]:
    found = []
    for add, servicer in registrations:
        for service, contracts in served_contracts([(add, servicer)]).items():
            for method in descriptor_pool.Default().FindServiceByName(service).methods:
                contract = contracts[f"/{service}/{method.name}"]
                reads = method.GetOptions().Extensions[options_pb2.retry] == options_pb2.RETRY_READ
                if not reads or method.client_streaming or "viewer" not in contract.roles:
                    continue
                found.append(
                    ReadingRpc(
                        name=f"/{service}/{method.name}",
                        contract=contract,
                        request_type=GetMessageClass(method.input_type),
                        call=getattr(servicer, method.name),
                        streams=method.server_streaming,
                    )
                )
    return found
