"""`/v1/responses` in terms of chats: its items are messages, its answers and events those of a chat, told otherwise.

Invariant: an agent that hands back all items of an answer continues the conversation, as with chats; nothing is stored,
so `previous_response_id` is refused. Pure; called by `app`.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from astraflow.plugins import Policy
from astraflow_raas.agents.api_errors import refused_body
from astraflow_raas.agents.calls import Answers
from astraflow_raas.agents.requests import ChatRequest


class _Part(BaseModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Item(BaseModel):
    """One item of the input: a message, a call of a tool, or its result; thoughts are passed over."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[_Part] = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[_Part] = ""


class _Tool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Plain(BaseModel):
    type: Literal["text"]


class _Format(BaseModel):
    format: _Plain | None = None


class ResponseRequest(BaseModel):
    """The body of `/v1/responses`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    input: Annotated[list[_Item], Field(min_length=1)] | Annotated[str, Field(min_length=1)]
    instructions: str = ""
    tools: list[_Tool] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: _Format | None = None
    stream: bool = False

    def call(self) -> ChatRequest:
        """The same as a chat. Raises ApiError."""
        items = [_Item(content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in items:
            _add(item, messages)
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        fields = {"model": self.model, "messages": messages, "tools": tools, "tool_choice": self.tool_choice}
        try:
            return ChatRequest.model_validate({**fields, "max_completion_tokens": self.max_output_tokens})
        except ValidationError as error:
            raise refused_body(error) from error


def response(request: ResponseRequest, answers: Answers, _policy: Policy) -> Mapping[str, Any]:
    """The body of a response."""
    (choice,) = answers.choices
    message, sampled = choice.message, len(choice.result.token_ids)
    output: list[Mapping[str, Any]] = []
    if message.content or not message.tool_calls:
        content = [{"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}]
        head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
        }
        output.append({**head, "content": content})
    for call in message.tool_calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        output.append({"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", **named})
    is_cut = choice.finish_reason == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": answers.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": request.tool_choice,
        "tools": [tool.model_dump() for tool in request.tools],
        "usage": {
            "input_tokens": answers.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answers.num_prompt_tokens + sampled,
        },
    }


def response_events(request: ResponseRequest, answers: Answers, policy: Policy) -> Iterator[str]:
    """The same as events: each item, in one piece, between the response begun and the response completed."""
    body = response(request, answers, policy)
    begun = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": begun})]
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        events.append(("response.output_item.added", {"output_index": index, "item": _empty(item)}))
        events += _call_events(item, place) if "arguments" in item else _text_events(item, place)
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
    events.append((f"response.{body['status']}", {"response": body}))
    for number, (kind, fields) in enumerate(events):
        event = {"type": kind, "sequence_number": number, **fields}
        yield f"event: {kind}\ndata: {json.dumps(event)}\n\n"


def _add(item: _Item, messages: list[dict[str, Any]]) -> None:
    """A call belongs to the assistant's message before it, for both came in one answer."""
    if item.type == "function_call":
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    elif item.type == "message":
        messages.append({"role": item.role, "content": _text(item.content)})


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _empty(item: Mapping[str, Any]) -> Mapping[str, Any]:
    emptied: tuple[str, object] = ("arguments", "") if "arguments" in item else ("content", [])
    return {**item, "status": "in_progress", **dict([emptied])}


def _call_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    name, said = "response.function_call_arguments", item["arguments"]
    return [
        (f"{name}.delta", {**place, "delta": said}),
        (f"{name}.done", {**place, "name": item["name"], "arguments": said}),
    ]


def _text_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    (part,) = item["content"]
    where = {**place, "content_index": 0}
    return [
        ("response.content_part.added", {**where, "part": {**part, "text": ""}}),
        ("response.output_text.delta", {**where, "delta": part["text"], "logprobs": []}),
        ("response.output_text.done", {**where, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {**where, "part": part}),
    ]
