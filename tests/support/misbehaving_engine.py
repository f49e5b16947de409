"""An engine that speaks SGLang's API over a bare socket and misbehaves as a test asks: wrong numbers, torn answers,
lost ones, silence. Without being asked it answers right, so whatever a client believes wrongly is the client's fault.
"""

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
STOP_TOKEN = 2
DRIP_S = 0.02


@dataclass
class Exchange:
    """One request and what would be answered to it, for a misbehaviour to spoil."""

    body: Json
    answer: Any
    writer: asyncio.StreamWriter
    status: int = 200
    text: str | None = None
    """Sent as it is instead of the answer."""

    def raw(self) -> bytes:
        """The whole response."""
        content = self.text if self.text is not None else json.dumps(self.answer)
        kind = "application/json" if self.text is None or self.text.startswith(("{", "[")) else "text/plain"
        data = content.encode()
        return (
            b"HTTP/1.1 %d Any\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
            % (
                self.status,
                kind.encode(),
                len(data),
            )
            + data
        )

    async def send(self) -> None:
        self.writer.write(self.raw())
        await self.writer.drain()


Misbehaviour = Callable[[Exchange], Awaitable[None]]


@dataclass
class MisbehavingEngine:
    """Its state, what was asked, and how it answers the next requests of each path."""

    version: str = "4"
    paused: bool = False
    num_tokens: int = 3
    slots: int = 8
    server_info: Json = field(default_factory=dict)
    """Changes to what it says of itself."""
    asked: list[tuple[str, Json]] = field(default_factory=list)
    scripts: dict[str, deque[Misbehaviour]] = field(default_factory=lambda: defaultdict(deque))
    may_update: asyncio.Event = field(default_factory=asyncio.Event)
    most_at_once: int = 0
    _now: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.may_update.set()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def next(self, path: str, *how: Misbehaviour) -> None:
        """Misbehave so in the next requests of `path`."""
        self.scripts[path].extend(how)

    async def _answer(self, path: str, body: Json) -> tuple[int, Any]:
        match path:
            case "/generate":
                self._now += len(body["rid"])
                self.most_at_once = max(self.most_at_once, self._now)
                await asyncio.sleep(0.01)
                self._now -= len(body["rid"])
                return 200, [self._sample(body, index) for index in range(len(body["rid"]))]
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/update_weights_from_disk":
                await self.may_update.wait()
                self.version = body["weight_version"]
                return 200, {"success": True, "message": "ok"}
            case "/model_info":
                return 200, {"weight_version": self.version}
            case "/server_info":
                state = {"effective_max_running_requests_per_dp": self.slots}
                info = {"version": "0.5.20", "disable_overlap_schedule": True, "internal_states": [state]}
                return 200, info | self.server_info
        return 200, {"status": "ok"}

    def _sample(self, body: Json, index: int) -> Json:
        length = min(self.num_tokens, body["sampling_params"][index]["max_new_tokens"])
        tokens = [7 + place for place in range(length - 1)] + [STOP_TOKEN]
        return {
            "output_ids": tokens,
            "meta_info": {
                "id": body["rid"][index],
                "finish_reason": {"type": "stop", "matched": STOP_TOKEN},
                "cached_tokens": 0,
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": length}],
                "output_token_logprobs": [[-0.5 - place, token, None] for place, token in enumerate(tokens)],
            },
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                path, body = await _read(reader)
                self.asked.append((path, body))
                how = self.scripts[path].popleft() if self.scripts[path] else None
                status, answer = await self._answer(path, body)
                exchange = Exchange(body, answer, writer, status)
                await (how(exchange) if how else exchange.send())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[str, Json]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    length = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
    body = json.loads(await reader.readexactly(length)) if length else {}
    return lines[0].split(" ")[1], body


@asynccontextmanager
async def misbehaving_engine(
    kind: type[MisbehavingEngine] = MisbehavingEngine, **settings: Any
) -> AsyncIterator[MisbehavingEngine]:
    """One that listens; connections that it left open are closed at the end."""
    engine = kind(**settings)
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.CancelledError):
            await engine.serve(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- misbehaviours ----------------------------------------------------------------------------------------------------


def meta(**changes: object) -> Misbehaviour:
    """Other entries in the first answer's meta_info; None leaves one out."""

    async def misbehave(exchange: Exchange) -> None:
        info = exchange.answer[0]["meta_info"] | changes
        exchange.answer[0]["meta_info"] = {name: value for name, value in info.items() if value is not None}
        await exchange.send()

    return misbehave


def outputs(*tokens: object, logprobs: tuple[object, ...] | None = None) -> Misbehaviour:
    """Other tokens in the first answer, with log-probs that fit unless given."""
    values = logprobs if logprobs is not None else (-1.0,) * len(tokens)

    async def misbehave(exchange: Exchange) -> None:
        first = exchange.answer[0]
        first["output_ids"] = list(tokens)
        pairs = [[value, token, None] for value, token in zip(values, tokens, strict=False)]
        spans = [{"version": first["meta_info"]["weight_version"], "start": 0, "end": len(tokens)}]
        first["meta_info"] |= {"output_token_logprobs": pairs, "weight_versions": spans}
        await exchange.send()

    return misbehave


def span(*bounds: tuple[str, int, int]) -> Misbehaviour:
    """Other version spans in the first answer."""
    return meta(weight_versions=[{"version": v, "start": start, "end": end} for v, start, end in bounds])


def says(status: int, text: str) -> Misbehaviour:
    """Answers with a status and a text; what was asked is done all the same."""

    async def misbehave(exchange: Exchange) -> None:
        exchange.status, exchange.text = status, text
        await exchange.send()

    return misbehave


async def too_few_answers(exchange: Exchange) -> None:
    exchange.answer = exchange.answer[1:]
    await exchange.send()


async def half_closed(exchange: Exchange) -> None:
    """Ends its side in the middle of the answer; what was asked is done all the same."""
    exchange.writer.write(exchange.raw()[:-5])
    exchange.writer.write_eof()


async def truncated_json(exchange: Exchange) -> None:
    exchange.text = json.dumps(exchange.answer)[:-5]
    await exchange.send()


async def hang(exchange: Exchange) -> None:
    await asyncio.Event().wait()


async def drip(exchange: Exchange) -> None:
    """A byte at a time, each in time by itself."""
    for byte in exchange.raw():
        exchange.writer.write(bytes([byte]))
        await exchange.writer.drain()
        await asyncio.sleep(DRIP_S)


async def reset(exchange: Exchange) -> None:
    """Closes the connection without a word; what was asked is done all the same."""
    exchange.writer.transport.abort()
