"""Typed reading of JSON objects that came from outside, with errors a caller can act on.

Invariant: what leaves here has the Python type its reader promises and lies within its bound; null counts
as absent, as it does for SGLang. Called by `api.py` only.
"""

import math
from collections.abc import Mapping, Set

from astraflow_engine.errors import InvalidRequest
from astraflow_kit.nearest import did_you_mean

_MAX_SHOWN = 60


def json_object(value: object, *, name: str) -> dict[str, object]:
    """`value` as an object, without its null members."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {shown(value)}, expected a JSON object")
    return {key: member for key, member in value.items() if member is not None}


def refuse_unknown(fields: Mapping[str, object], known: Set[str], *, where: str) -> None:
    """Refuse members that this engine does not know at all."""
    for name in fields:
        if name not in known:
            raise InvalidRequest(f"{where} has an unknown field {name!r}. {did_you_mean(name, known)}")


def refuse_other_than(fields: Mapping[str, object], neutral: Mapping[str, object], *, where: str) -> None:
    """Refuse members this engine cannot honour, unless they hold the value that asks for nothing."""
    for name, nothing in neutral.items():
        value = fields.get(name, nothing)
        if value != nothing and value not in ([], {}, ""):
            raise InvalidRequest(
                f"{where}.{name} is {shown(value)}, this engine supports only {nothing!r}; leave it out, "
                "or use SGLang for requests that need it"
            )


def integer(fields: Mapping[str, object], name: str, *, default: int, low: int, high: int) -> int:
    """A JSON integer in [low, high]."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {shown(value)}, expected an integer from {low} to {high}")
    return value


def number(fields: Mapping[str, object], name: str, *, default: float, bound: str, low: float) -> float:
    """A finite JSON number of at least `low`; `bound` says the limit in words."""
    value = fields.get(name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < low
    ):
        raise InvalidRequest(f"{name} is {shown(value)}, expected {bound}")
    return float(value)


def boolean(fields: Mapping[str, object], name: str, *, default: bool) -> bool:
    """A JSON boolean."""
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}, expected true or false")
    return value


def text(fields: Mapping[str, object], name: str, *, default: str | None = None) -> str:
    """A JSON string; required when there is no default."""
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {shown(value)}, expected a string")
    return value


def token_ids(value: object, *, name: str, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids inside the vocabulary."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} is {shown(value)}, expected a list of token ids")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name}[{position}] is {shown(token)}, expected a token id from 0 to {vocab_size - 1} "
                f"(vocabulary of {vocab_size}); check that the caller's tokenizer is the served model's"
            )
    return tuple(value)


def shown(value: object) -> str:
    """A value as it appears in a message: its form in Python, shortened."""
    form = "missing" if value is None else repr(value)
    return form if len(form) <= _MAX_SHOWN else f"{form[:_MAX_SHOWN]}… ({type(value).__name__})"
