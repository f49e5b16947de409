"""Replies of Redis as plain values, and a truth value as the functions take it. Pure; called by the stores."""

from typing import TypeAlias

Reply: TypeAlias = "int | bytes | list[Reply] | None"


def as_ms(seconds: float) -> int:
    """Return a time as functions take it."""
    return int(seconds * 1000)


def flag(value: bool) -> str:  # noqa: FBT001 - a conversion, as bool() is
    """Return a truth value as the functions read it."""
    return "1" if value else "0"


def as_text(reply: object) -> str:
    """Return a bulk reply as text; empty for nil."""
    if reply is None:
        return ""
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def as_bytes(reply: object) -> bytes:
    """Return a bulk reply as bytes; empty for nil."""
    return reply if isinstance(reply, bytes) else b""


def as_int(reply: object) -> int:
    """Return a reply as an int; 0 for nil or empty."""
    return int(reply) if isinstance(reply, int | bytes) and reply != b"" else 0


def as_list(reply: object) -> list[Reply]:
    """Return an array reply; empty for nil."""
    return reply if isinstance(reply, list) else []


def as_texts(reply: object) -> list[str]:
    """Return an array of bulk replies as texts; empty for nil."""
    return [as_text(item) for item in as_list(reply)]


def as_mapping(reply: object) -> dict[str, bytes]:
    """Return a flat field-value array as a mapping."""
    flat = as_list(reply)
    return {as_text(field): as_bytes(value) for field, value in zip(flat[::2], flat[1::2], strict=True)}
