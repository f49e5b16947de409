"""Values of Python between processes that do not trust each other: JSON, with a tag where JSON lacks a kind.

Invariant: decoding makes plain values of built-in types only, whatever the other side wrote; an object that is no plain
value travels as a name that only its owner can look up. Standard library only: runs within the sandbox too.
"""

import math
from collections.abc import Callable
from typing import Any

_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAX_DEPTH = 100


class NotPlainError(ValueError):
    """A text that encodes no value."""


def encode(value: Any, *, keep: Callable[[Any], Any], depth: int = 0) -> Any:  # noqa: ANN401 - any value
    """The JSON form of `value`; `keep` takes an object that has none, and returns its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if depth > _MAX_DEPTH:
        raise RecursionError("the value is nested too deeply")
    return _encode_container(value, lambda item: encode(item, keep=keep, depth=depth + 1), keep)


def _encode_container(value: Any, inner: Callable[[Any], Any], keep: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    if isinstance(value, list):
        return [inner(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):  # type: ignore[arg-type]
            return {name: [inner(item) for item in value]}
    return {"object": keep(value)}


def decode(sent: Any, *, look_up: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - any value
    """The value that `encode` wrote. Raises NotPlainError."""
    if isinstance(sent, list):
        return [decode(item, look_up=look_up) for item in sent]
    if not isinstance(sent, dict):
        return sent
    try:
        ((tag, body),) = sent.items()
        return _decode_tagged(tag, body, lambda item: decode(item, look_up=look_up), look_up)
    except NotPlainError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise NotPlainError(f"{str(sent)[:100]}: {error}") from error


def _decode_tagged(tag: str, body: Any, inner: Callable[[Any], Any], look_up: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](inner(item) for item in body)
    match tag:
        case "dict":
            return {inner(key): inner(item) for key, item in body}
        case "float":
            return float(body)
        case "complex":
            return complex(*body)
        case "bytes":
            return bytes.fromhex(body)
        case "object":
            return look_up(body)
    raise NotPlainError(f"no value is tagged {tag[:50]!r}")
