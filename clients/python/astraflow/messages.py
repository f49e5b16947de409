"""Chat messages and tools as plug-ins see them.

Invariant: plain values in the shape of the OpenAI API; standard library only. Part of `plugins`, from where plug-ins
import them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["Message", "Tool", "ToolCall"]


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool `name` by an assistant; `arguments` is a JSON object as text, `id` names the call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    """A tool that an assistant may call; `parameters` is a JSON schema as text."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'

    def as_chat(self) -> dict[str, Any]:
        """Return the mapping that chat templates take."""
        schema = json.loads(self.parameters)
        described = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Message:
    """One chat message in the shape of the OpenAI API: `role` is `system`, `user`, `assistant` or `tool`.

    An assistant makes `tool_calls`; a tool answers `tool_call_id`. `name` tells apart who has the same role.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def as_chat(self) -> dict[str, Any]:
        """Return the mapping that chat templates take; arguments are decoded where they are JSON."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _decoded(call)}}
            for call in self.tool_calls
        ]
        optional = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        given = {name: value for name, value in optional.items() if value}
        return {"role": self.role, "content": self.content, **given}


def _decoded(call: ToolCall) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments
