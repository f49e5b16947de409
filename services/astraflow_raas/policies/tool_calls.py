"""Tool calls as models write them: which format a chat template asks for, and what a text in it calls.

Invariant: a text is read whole or not at all: one malformed call leaves everything text, so nothing that was said is
lost. Formats are chosen by what the template holds. Pure; called by `tokenizer`.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from astraflow.plugins import Tool

Called: TypeAlias = tuple[str, Mapping[str, Any]]
"""Name and arguments."""
Reader: TypeAlias = Callable[[str, Sequence[Tool]], tuple[str, list[Called]]]
"""Returns what is said beside the calls, and the calls; raises ValueError for a malformed one."""

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_FUNCTION = re.compile(r"<function=([^>\s]+)>\s*(.*?)\s*</function>", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.S)
_MISTRAL_NAME = re.compile(r"\s*(?:\[TOOL_CALLS\])?([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def reader_of(template: str) -> Reader | None:
    """The reader of the format that a chat template asks for; None for one that has none, or none known here."""
    return next((reader for marks, reader in _FORMATS if all(mark in template for mark in marks)), None)


def _hermes(text: str, _tools: Sequence[Tool]) -> tuple[str, list[Called]]:
    return _outside_blocks(text), [_call(json.loads(block)) for block in _BLOCK.findall(text)]


def _xml(text: str, tools: Sequence[Tool]) -> tuple[str, list[Called]]:
    """`<function=name><parameter=key>value`: the tool's schema says which values are text."""
    schemas = {tool.name: json.loads(tool.parameters).get("properties", {}) for tool in tools}
    calls: list[Called] = []
    for block in _BLOCK.findall(text):
        found = _FUNCTION.fullmatch(block)
        if found is None:
            raise ValueError("no function")
        schema = schemas.get(found[1], {})
        calls.append((found[1], {k: _value(v, schema.get(k, {})) for k, v in _PARAMETER.findall(found[2])}))
    return _outside_blocks(text), calls


def _llama(text: str, _tools: Sequence[Tool]) -> tuple[str, list[Called]]:
    """`{"name": …, "parameters": …}`, several with `;` between them, alone in the turn."""
    said, tag, rest = text.rpartition("<|python_tag|>")
    if not tag and not text.lstrip().startswith("{"):
        return text, []
    return said.strip(), [_call(item) for item in _objects(rest.replace("<|eom_id|>", ""))]


def _mistral(text: str, _tools: Sequence[Tool]) -> tuple[str, list[Called]]:
    """After `[TOOL_CALLS]` a list of objects, or names with objects."""
    said, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return text, []
    if rest.lstrip().startswith("["):
        return said.strip(), [_call(item) for item in json.loads(rest)]
    calls: list[Called] = []
    position, decoder = 0, json.JSONDecoder()
    while rest[position:].strip():
        name = _MISTRAL_NAME.match(rest, position)
        if name is None:
            raise ValueError("no name")
        arguments, position = decoder.raw_decode(rest, name.end())
        calls.append((name[1], arguments))
    return said.strip(), calls


def _pythonic(text: str, _tools: Sequence[Tool]) -> tuple[str, list[Called]]:
    """`[name(key=value), …]`, alone in the turn."""
    if not re.match(r"\s*\[\s*[\w.]+\(", text):
        return text, []
    try:
        (wanted,) = ast.parse(text.strip()).body
        calls = wanted.value.elts  # type: ignore[attr-defined]
        return "", [
            (ast.unparse(call.func), {word.arg: ast.literal_eval(word.value) for word in call.keywords})
            for call in calls
        ]
    except (AttributeError, SyntaxError) as error:
        raise ValueError(str(error)) from error


_FORMATS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("<tool_call>", "<function="), _xml),
    (("<tool_call>",), _hermes),
    (("[TOOL_CALLS]",), _mistral),
    (("[func_name1(",), _pythonic),
    (('"parameters"', "ipython"), _llama),
)
"""What a template holds → how its model calls; the first that fits."""


def _outside_blocks(text: str) -> str:
    outside = _BLOCK.sub("", text)
    if "<tool_call>" in outside:
        raise ValueError("a call without an end")
    return outside.strip() if _BLOCK.search(text) else text


def _call(item: Any) -> Called:  # noqa: ANN401 - JSON
    name, arguments = item["name"], item.get("arguments", item.get("parameters", {}))
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError("a call is a name and an object")
    return name, arguments


def _value(text: str, schema: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _objects(text: str) -> Iterator[Any]:
    decoder, position = json.JSONDecoder(), 0
    while text[position:].strip(" ;\n"):
        start = position + re.match(r"[ ;\n]*", text[position:]).end()  # type: ignore[union-attr]
        item, position = decoder.raw_decode(text, start)
        yield item
