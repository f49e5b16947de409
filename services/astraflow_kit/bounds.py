"""What every request is held against before a servicer sees it.

Invariant: no integer passes that a double does not hold exactly, since Lua and JavaScript compute with doubles, and no
id with a character that separates lines or fields. Fields are found by descriptor, so a new one is bounded as soon as
its contract has it. Called by `serve`.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from astraflow.errors import InvalidArgumentError

MAX_INTEGER = 2**53
MAX_ID_CHARACTERS = 256
_MAX_SECONDS = 315_576_000_000
"""Ten thousand years, of a Duration and a Timestamp alike."""
_SECONDS = frozenset({"google.protobuf.Duration.seconds", "google.protobuf.Timestamp.seconds"})
_ALL_BITS = frozenset({"incarnation", "holder_incarnation", "seed"})
"""Fields that nobody computes with: they are kept as text, or handed on."""
_SEPARATOR = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_WIDE = frozenset({FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64})


def require_bounds(message: Message, *, within: str = "") -> None:
    """Raise InvalidArgumentError for an integer or id beyond its bound, naming field, value and bound."""
    within = within or f"{message.DESCRIPTOR.name}."
    for field, most in _fields(message.DESCRIPTOR):
        for place, value in _values(message, field):
            if isinstance(value, Message):
                require_bounds(value, within=f"{within}{place}.")
            elif isinstance(value, str):
                _require_id(value, place=within + place)
            elif abs(value) > most:
                raise InvalidArgumentError(f"{within}{place} is {value}, at most {most}")


def _require_id(value: str, *, place: str) -> None:
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidArgumentError(f"{place} has {len(value)} characters, at most {MAX_ID_CHARACTERS}")
    if _SEPARATOR.search(value):
        raise InvalidArgumentError(
            f"{place} is {value!r}; an id has no control characters and no line breaks"
        )


@cache
def _fields(described: Descriptor) -> tuple[tuple[FieldDescriptor, int], ...]:
    """The integers of a message with their bound, its ids, and the messages that hold some of these."""
    return tuple(_search(described))


def _search(described: Descriptor) -> Iterator[tuple[FieldDescriptor, int]]:
    for field in described.fields:
        held = field.message_type
        valued = held.fields_by_name["value"] if held is not None and held.GetOptions().map_entry else field
        if valued.cpp_type in _WIDE and field.name not in _ALL_BITS:
            yield field, _MAX_SECONDS if field.full_name in _SECONDS else MAX_INTEGER
        elif _is_id(field) or (
            valued.message_type is not None and _holds_some(valued.message_type, frozenset())
        ):
            yield field, 0


def _holds_some(described: Descriptor, above: frozenset[str]) -> bool:
    above |= {described.full_name}
    inner = (field.message_type for field in described.fields if field.message_type is not None)
    return any(field.cpp_type in _WIDE or _is_id(field) for field in described.fields) or any(
        message.full_name not in above and _holds_some(message, above) for message in inner
    )


def _is_id(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_STRING and field.name.endswith(("_id", "_ids"))


def _values(message: Message, field: FieldDescriptor) -> Iterator[tuple[str, Any]]:
    name = field.name
    if not field.is_repeated:
        if field.message_type is None or message.HasField(name):
            yield name, getattr(message, name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key, value in getattr(message, name).items():
            yield f"{name}[{str(key)[:64]}]", value
    else:
        for index, value in enumerate(getattr(message, name)):
            yield f"{name}[{index}]", value
