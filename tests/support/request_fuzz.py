"""Hostile requests by the thousand, from the contracts' own descriptors: a good request in which fields are set to what
lies at or beyond some bound, or whose bytes are damaged on the wire. Each comes from a seed. Used by the fuzz tests.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_TEXTS = (
    *("", " ", "a b", "a\nb", "\r\n", "\x00", "\x1b[31m", "\u2028", "\u202e", "é" * 64, "🦜" * 300),
    *(
        "x" * 64,
        "x" * 129,
        "x" * 257,
        "x" * 70_000,
        "..",
        "../../etc/passwd",
        "/",
        "file:///",
        "http://a",
        "eval:x",
    ),
    *(
        "%s%n",
        "{run}",
        "run",
        "solver",
        "n1",
        "-1",
        "1e999",
        "NaN",
        "9" * 400,
        "0-0",
        "18446744073709551616-0",
    ),
    *("[" * 3000, '{"a":' * 3000, "run: *a", "&a [*a, *a]", "{", "null", "true", "=" * 1000),
)
_NUMBERS = (
    0,
    1,
    2,
    3,
    -1,
    255,
    1024,
    1025,
    4096,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**64 - 1,
)
_FIGURES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.0,
    5e-324,
    1e38,
    1e308,
    -1e308,
    2.0**53,
    math.nan,
    math.inf,
    -math.inf,
)
_COUNTS = (1, 2, 3, 65, 257, 1025, 4097)
_MAX_DEPTH, _MAX_BYTES = 6, 500_000


def hostile(good: Message, draw: random.Random) -> bytes:
    """The bytes of one hostile request; now and then of the good one."""
    request = type(good)()
    request.CopyFrom(good)
    for _ in range(draw.randrange(4)):
        _spoil(request, draw)
    content = request.SerializeToString()
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        content = draw.choice(_ON_THE_WIRE)(content, draw)
    return content


def plausible(described: Descriptor, draw: random.Random, *, depth: int = 0) -> Message:
    """A message whose fields are set to something of their type, some of them; nothing of it need be known."""
    message: Any = message_factory.GetMessageClass(described)()
    for field in described.fields:
        if depth < _MAX_DEPTH and draw.random() < 0.5:
            _put(message, field, _value(field, draw, depth=depth + 1))
    return message  # type: ignore[no-any-return]


def _spoil(message: Any, draw: random.Random) -> None:
    """One field somewhere in the message gets another value, is left out, or is there many times."""
    while True:
        if not message.DESCRIPTOR.fields:
            return
        field = draw.choice(message.DESCRIPTOR.fields)
        inner = _inside(message, field)
        if not inner or draw.random() < 0.3:
            break
        message = draw.choice(inner)
    if draw.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated and not _is_map(field):
        value = _value(field, draw, depth=_MAX_DEPTH)
        size = value.ByteSize() if isinstance(value, Message) else len(str(value))
        for _ in range(min(draw.choice(_COUNTS), 1 + _MAX_BYTES // (1 + size))):
            _put(message, field, value)
    else:
        _put(message, field, _value(field, draw, depth=_MAX_DEPTH - 1))


def _inside(message: Any, field: FieldDescriptor) -> Sequence[Any]:
    if field.message_type is None or _is_map(field):
        return ()
    if field.is_repeated:
        return list(getattr(message, field.name))
    return [getattr(message, field.name)] if message.HasField(field.name) else ()


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _value(field: FieldDescriptor, draw: random.Random, *, depth: int) -> Any:
    if field.message_type is not None:
        return plausible(field.message_type, draw, depth=depth)
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.choice(
            (b"", b"\0", b"x" * 32, b"x" * 33, b"{", b"[" * 5000, draw.randbytes(200), b"x" * 2_000_000)
        )
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw.choice(_FIGURES)
    return draw.choice(_NUMBERS)  # of an enum, too: unknown ones travel


def _put(message: Any, field: FieldDescriptor, value: Any) -> None:
    """Set a field, or add to it, as far as its type can hold the value."""
    try:
        if _is_map(field):
            held = getattr(message, field.name)
            if isinstance(value.value, Message):
                held[value.key].CopyFrom(value.value)
            else:
                held[value.key] = value.value
        elif field.is_repeated:
            held = getattr(message, field.name)
            (held.append if field.message_type is None else held.add().CopyFrom)(value)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    except ValueError:
        return  # a number that its type does not have


# ---------------------------------------------------------------- on the wire


def _flipped(content: bytes, draw: random.Random) -> bytes:
    """One bit; the highest of a text's byte makes bad UTF-8 of it."""
    if not content:
        return content
    spoilt = bytearray(content)
    at = draw.randrange(len(spoilt))
    spoilt[at] ^= 1 << draw.choice((7, 7, *range(8)))
    return bytes(spoilt)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _grown(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + draw.randbytes(draw.choice((1, 2, 8, 300))) + content[at:]


def _again(content: bytes, draw: random.Random) -> bytes:
    """Twice in one message: fields merge, lists have all elements again."""
    return content * draw.choice((2, 3, 20))


def _unknown_fields(content: bytes, draw: random.Random) -> bytes:
    return content + draw.choice((b"\xf8\xff\xff\xff\x0f\x01", b"\x9a\x3e\x03abc", b"\xc0\x3e\x01" * 5000))


def _nested(content: bytes, draw: random.Random) -> bytes:
    """Groups within groups, or messages within messages, deeper than any contract."""
    depth = draw.choice((50, 99, 101, 5000))
    if draw.random() < 0.5:
        return content + b"\x9b\x3e" * depth + b"\x9c\x3e" * depth
    inner = b""
    for _ in range(min(depth, 200)):
        inner = b"\x0a" + _varint(len(inner)) + inner
    return content + inner


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low]) if not rest else bytes([low | 0x80]) + _varint(rest)


_ON_THE_WIRE: Sequence[Callable[[bytes, random.Random], bytes]] = (
    *(_flipped, _flipped, _flipped, _flipped),
    *(_cut, _grown, _again, _unknown_fields, _nested),
)
