"""What clients of the OpenAI API send, checked field by field.

Invariant: a field is honoured, ignored by name, or refused; docs/agents.md has the same table. Messages become those of
`plugins`, so that equal messages compare equal however a client writes them. Pure; called by `app`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from astraflow.plugins import Message, Tool, ToolCall
from astraflow_raas.agents.api_errors import ApiError, refused_body

IGNORED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "best_of", "prediction"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "reasoning_effort", "verbosity"),
        *("parallel_tool_calls", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "include", "reasoning", "truncation"),
    }
)
"""Fields that change nothing here: the recipe decides how a policy is sampled, and nothing is stored elsewhere."""
MAX_CHOICES = 64

_Stop = Annotated[str, Field(min_length=1)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Function(BaseModel):
    name: str
    arguments: str


class _Declared(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def plain(self) -> Tool:
        schema = self.parameters or {"type": "object", "properties": {}}
        return Tool(self.name, self.description or "", json.dumps(schema))


class _WrittenTool(BaseModel):
    type: Literal["function"]
    function: _Declared


class _WrittenCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _WrittenMessage(BaseModel):
    """One message; clients hand back fields of answers that mean nothing here, which are passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    name: str | None = None
    tool_calls: list[_WrittenCall] | None = None
    tool_call_id: str | None = None

    def plain(self) -> Message:
        text = self.content or ""
        calls = self.tool_calls or ()
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=text if isinstance(text, str) else "".join(part.text for part in text),
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments) for call in calls
            ),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Sampled(_Fields):
    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = ()  # type: ignore[assignment]
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    def call(self) -> Self:
        """What is asked."""
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends, without them."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(_Sampled):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[_WrittenMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    tools: Annotated[list[_WrittenTool], Field(max_length=128)] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages as plug-ins see them."""
        return tuple(message.plain() for message in self.messages)

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools as plug-ins see them."""
        return tuple(tool.function.plain() for tool in self.tools)

    @property
    def max_new_tokens(self) -> int | None:
        """The bound that the client set."""
        return self.max_completion_tokens or self.max_tokens


class TextRequest(_Sampled):
    """The body of `/v1/completions`: a text as it is, without a chat template."""

    prompt: Annotated[str, Field(min_length=1)]
    logprobs: Literal[0] | None = None
    echo: Literal[False] = False

    @property
    def max_new_tokens(self) -> int | None:
        """The bound that the client set."""
        return self.max_tokens


RequestT = TypeVar("RequestT", bound=BaseModel)


def read(body: bytes, kind: type[RequestT]) -> tuple[RequestT, Sequence[str]]:
    """Return the request and the names of the fields that were ignored. Raises ApiError."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, Mapping):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    ignored = sorted(name for name, value in given.items() if _is_ignored(name, value))
    try:
        wanted = {name: value for name, value in given.items() if name not in IGNORED}
        return kind.model_validate(wanted), ignored
    except ValidationError as error:
        raise refused_body(error) from error


def _is_ignored(name: str, value: object) -> bool:
    # Nothing can make a policy call a tool: it is sampled freely, and what it does is what it is trained on.
    return name in IGNORED or (name == "tool_choice" and value not in ("none", "auto"))
