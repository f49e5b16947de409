"""Tools as an environment: an assistant calls functions, HTTP endpoints or tools of MCP servers, and is done when it
calls none.

Invariant: whatever a tool does wrong is shown to the assistant as the answer of that call and fails nothing; every call
has a deadline, every answer a length. Named by a recipe, or subclassed with functions of its own, as
`astraflow_environment.tools:Tools`.
"""

import asyncio
import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec, Tool, ToolCall
from astraflow_kit.http_answers import post_json

Call: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[str]]
_MAX_CALLS = 16
"""Calls of one turn that are carried out."""
_MAX_ANSWER_BYTES = 2**20
"""Of an endpoint; what is more is an error, unread. `max_output_chars` of it are shown."""


@dataclass(frozen=True, kw_only=True)
class HttpTool:
    """An endpoint that takes the arguments as a JSON object by POST and answers text."""

    name: str
    url: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """A server of the Model Context Protocol: a command that is started, or an address."""

    command: Sequence[str] = ()
    url: str = ""


class Tools:
    """The tools of one episode."""

    def __init__(
        self,
        *,
        functions: Sequence[str] = (),
        http: Sequence[HttpTool] = (),
        mcp: Sequence[McpServer] = (),
        timeout_s: float = 20.0,
        max_output_chars: int = 8000,
    ) -> None:
        """`functions` are `module:name`; a subclass may give functions themselves."""
        self._http = http
        self._mcp = mcp
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._tools: dict[str, tuple[Tool, Call]] = {}
        self._closing = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None
        self._num_calls = self._num_errors = 0
        for each in functions:
            self._add(*_function_tool(_imported(each)))

    async def reset(self, task: TaskSpec) -> Observation:
        """Connect, and name the tools; the task's own messages are the prompt."""
        for endpoint in self._http:
            tool = Tool(endpoint.name, endpoint.description, json.dumps(endpoint.parameters))
            self._add(tool, _poster(endpoint.url, timeout_s=self._timeout_s))
        if self._mcp:
            connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(connected))
            await connected
        return Observation(tools=tuple(tool for tool, _ in self._tools.values()))

    async def step(self, action: Message) -> Observation:
        """Carry out the calls side by side; without any the episode is done."""
        answers = await asyncio.gather(
            *(self._answer(number, call) for number, call in enumerate(action.tool_calls))
        )
        counts = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return Observation(messages=tuple(answers), done=not action.tool_calls, metrics=counts)

    async def close(self) -> None:
        """Disconnect."""
        self._closing.set()
        if self._holder is not None:
            await self._holder

    def _add(self, tool: Tool, call: Call) -> None:
        if tool.name in self._tools:
            raise ValueError(f"two tools are named {tool.name!r}; rename one")
        self._tools[tool.name] = (tool, call)

    async def _answer(self, number: int, call: ToolCall) -> Message:
        self._num_calls += 1
        try:
            text = await self._result(number, call)
        except Exception as error:  # noqa: BLE001 - a tool may raise anything; the assistant reads what
            self._num_errors += 1
            late = isinstance(error, TimeoutError)
            why = f"no answer within {self._timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            text = f"error: {why}"
        limit = self._max_output_chars
        if len(text) > limit:
            text = f"{text[:limit]}\n… ({len(text) - limit} more characters)"
        return Message("tool", text, tool_call_id=call.id, name=call.name)

    async def _result(self, number: int, call: ToolCall) -> str:
        if number >= _MAX_CALLS:
            raise ValueError(f"at most {_MAX_CALLS} calls in one turn; call again")
        if call.name not in self._tools:
            raise LookupError(f"no tool {call.name!r}; there are {', '.join(self._tools)}")
        arguments = json.loads(call.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError("arguments are a JSON object")
        async with asyncio.timeout(self._timeout_s):
            return await self._tools[call.name][1](arguments)

    async def _hold(self, connected: "asyncio.Future[None]") -> None:
        """Connect, and disconnect in the same task, as the client demands."""
        try:
            async with AsyncExitStack() as opened:
                for server in self._mcp:
                    await self._connect(server, opened)
                connected.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if connected.done():
                raise
            connected.set_exception(error)

    async def _connect(self, server: McpServer, opened: AsyncExitStack) -> None:
        try:
            import mcp
        except ModuleNotFoundError as error:
            raise MissingCapability(
                "MCP servers need the package mcp; pip install 'astraflow[mcp]'"
            ) from error
        command, *arguments = server.command or ("",)
        target = mcp.StdioServerParameters(command=command, args=arguments) if command else server.url
        client = await opened.enter_async_context(mcp.Client(target))
        for found in (await client.list_tools()).tools:
            tool = Tool(found.name, found.description or "", json.dumps(found.input_schema))
            self._add(tool, _mcp_call(client, found.name))


def _imported(function: object) -> Callable[..., Any]:
    if not isinstance(function, str):
        return cast("Callable[..., Any]", function)
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _function_tool(function: Callable[..., Any]) -> tuple[Tool, Call]:
    """Name, description and schema from the name, the docstring and the annotations."""
    fields: dict[str, Any] = {}
    hints = inspect.get_annotations(function, eval_str=True)
    for name, parameter in inspect.signature(function).parameters.items():
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), default)
    model: type[BaseModel] = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    schema = json.dumps(model.model_json_schema())

    async def call(arguments: Mapping[str, Any]) -> str:
        try:
            checked = model.model_validate(arguments)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ValueError(wrong) from error
        given = {name: getattr(checked, name) for name in fields}
        if inspect.iscoroutinefunction(function):
            return _text(await function(**given))
        return _text(await asyncio.to_thread(function, **given))

    return Tool(function.__name__, inspect.getdoc(function) or "", schema), call


def _poster(url: str, *, timeout_s: float) -> Call:
    async def call(arguments: Mapping[str, Any]) -> str:
        import httpx

        async with httpx.AsyncClient(timeout=timeout_s) as client:
            answer = await post_json(client, url, dict(arguments), max_bytes=_MAX_ANSWER_BYTES)
        if answer.is_error:
            raise OSError(f"status {answer.status_code}: {answer.text}")
        return answer.text

    return call


def _mcp_call(client: Any, name: str) -> Call:  # noqa: ANN401 - of an optional package
    async def call(arguments: Mapping[str, Any]) -> str:
        answer = await client.call_tool(name, dict(arguments))
        text = "\n".join(getattr(part, "text", f"({part.type})") for part in answer.content)
        if answer.is_error:
            raise RuntimeError(text)
        return text

    return call


def _text(result: object) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str)
