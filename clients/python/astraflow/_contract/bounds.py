"""What every field of a request may hold: the contract's `bounds`, or the default of its type.

Invariant: what passes has no integer that a double does not hold exactly (Lua and JavaScript compute with doubles), no
figure that is not finite, no text that separates lines unless the contract says so, and no list or bytes without an
end. The checks of a message are made once, from its descriptor, so a new field is bounded as soon as its contract has
it. Called by clients before they send, by the kit before a servicer sees a request, by the server on what it judges.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor

from astraflow.errors import InvalidArgumentError
from astraflow.options.v1 import options_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

__all__ = ["MAX_INTEGER", "admit", "judge", "require_bounds", "require_incarnation"]

MAX_INTEGER = 2**53
MAX_CHARACTERS, MAX_BYTES, MAX_ITEMS, MAX_ENTRIES = 256, 1024, 1024, 256
_SHOWN = 64
_SEPARATOR = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SECONDS = {
    "google.protobuf.Duration": (-315_576_000_000, 315_576_000_000),
    "google.protobuf.Timestamp": (-62_135_596_800, 253_402_300_799),
}
_PER_S = 10**9
_DAY_NS = 86_400 * _PER_S
_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_FIGURES = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)

Look: TypeAlias = "Callable[[Any], None]"
"""Raises _Outside for what it is given."""
_Check: TypeAlias = "tuple[Callable[[Any], Any], Look, FieldDescriptor, options_pb2.Bounds]"
"""What to take of a message, what looks at it, and for whom."""
_Fit: TypeAlias = "Callable[[Collection[Any]], bool]"
"""Whether all of some values are surely within their bounds; where it says no, each is looked at."""


@dataclass(frozen=True, eq=False)  # one object each: checks are found by it for every message
class _Purpose:
    cuts: bool = False
    """Values outside bounds that are `clamped` are brought to them; otherwise they pass."""
    judges: bool = False
    """The bounds of fields with `poison` are looked at, otherwise all others."""
    whole: bool = False
    """All bounds are looked at."""

    def concerns(self, bounds: options_pb2.Bounds) -> bool:
        return self.whole or bool(bounds.poison) is self.judges


_SENDING, _ADMITTING = _Purpose(), _Purpose(cuts=True)
_JUDGING, _JUDGING_WHOLE = _Purpose(judges=True), _Purpose(judges=True, whole=True)


class _Outside(Exception):
    def __init__(self, value: str, limit: str) -> None:
        """`value` is the value in words, with its verb; `limit` what was wanted."""
        super().__init__()
        self.value, self.limit = value, limit
        self.place = ""
        self.own: options_pb2.Bounds | None = None

    def within(self, name: str, bounds: options_pb2.Bounds | None = None) -> _Outside:
        """The same, seen from the message or list around it."""
        if self.own is None:  # that of the field itself, not of one around it
            self.own = bounds
        self.place = name + ("." if self.place and self.place[0] != "[" else "") + self.place
        return self

    def sentence(self, name: str) -> str:
        remedy = f"; {self.own.remedy}" if self.own is not None and self.own.remedy else ""
        return f"{name}.{self.place} {self.value}, {self.limit}{remedy}"


def require_bounds(message: Message) -> None:
    """Raise InvalidArgumentError for a value that no server takes, naming field, value and limit.

    What servers cut passes, and what they answer with OUTCOME_POISON.
    """
    _require(message, _SENDING)


def admit(message: Message) -> None:
    """Hold a received request against its bounds, and bring values to theirs that are `clamped`.

    Fields that this release does not know are dropped. Raises InvalidArgumentError.
    """
    message.DiscardUnknownFields()
    _require(message, _ADMITTING)


def judge(message: Message, *, otherwise: str = "") -> tuple[str, str] | None:
    """The first field with `poison` that is outside its bounds, as reason and sentence; None when none is.

    With `otherwise` every field is looked at, and that is the reason of those without one.
    """
    try:
        _look_at(message.DESCRIPTOR, _JUDGING_WHOLE if otherwise else _JUDGING)(message)
    except _Outside as error:
        poison = error.own.poison if error.own is not None else ""
        return poison or otherwise, error.sentence(message.DESCRIPTOR.name)
    return None


def require_incarnation(incarnation: int) -> None:
    """Raise InvalidArgumentError for one beyond the time in nanoseconds and a day, which would fence its holder."""
    if incarnation > (most := time.time_ns() + _DAY_NS):
        raise InvalidArgumentError(
            f"incarnation {incarnation} is beyond this server's clock, at most {most}; count starts, or give the time, "
            "and set the clock of that machine"
        )


def _require(message: Message, purpose: _Purpose) -> None:
    try:
        _look_at(message.DESCRIPTOR, purpose)(message)
    except _Outside as error:
        known = {"field": error.place, "value": error.value, "limit": error.limit}
        raise InvalidArgumentError(error.sentence(message.DESCRIPTOR.name), metadata=known) from None


@cache
def _look_at(described: Descriptor, purpose: _Purpose) -> Look:
    checks = tuple(_checks(described, purpose))

    def look(message: Message) -> None:
        try:
            for take, each, field, bounds in checks:  # noqa: B007 - the last two when one refuses
                each(take(message))
        except _Outside as error:
            raise error.within(field.name, bounds) from None

    return look


def _checks(described: Descriptor, purpose: _Purpose) -> Iterator[_Check]:
    for field in described.fields:
        bounds = field.GetOptions().Extensions[options_pb2.bounds]
        own = purpose.concerns(bounds)
        look = _of_field(field, bounds, purpose, own=own)
        if look is not None:
            needs_all = field.has_presence or bounds.clamped
            yield (_itself if needs_all else attrgetter(field.name)), look, field, bounds


def _itself(message: Message) -> Message:
    return message


@cache
def _concerns(described: Descriptor, purpose: _Purpose) -> bool:
    return described.full_name in _SECONDS or any(True for _ in _checks(described, purpose))


def _of_field(
    field: FieldDescriptor, bounds: options_pb2.Bounds, purpose: _Purpose, *, own: bool
) -> Look | None:
    """Looks at the value of the field, or at the message that has it where it may be unset, many or changed."""
    if field.is_repeated:
        return _of_many(field, bounds, purpose, own=own)
    if bounds.clamped and own:
        return partial(_bring, field, bounds) if purpose.cuts else None
    single = _of_value(field, bounds, purpose, own=own)
    required = own and bounds.required
    if not field.has_presence or (single is None and not required):
        return single
    name = field.name

    def look(message: Message) -> None:
        if message.HasField(name):
            if single is not None:
                single(getattr(message, name))
        elif required:
            raise _Outside("is not set", "but must be")

    return look


def _of_value(
    field: FieldDescriptor, bounds: options_pb2.Bounds, purpose: _Purpose, *, own: bool
) -> Look | None:
    if field.message_type is not None:
        return _of_message(field.message_type, bounds, purpose, own=own)
    if not own or field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return None
    if field.type == FieldDescriptor.TYPE_STRING:
        return _of_text(bounds)
    if field.type == FieldDescriptor.TYPE_BYTES:
        least, most = bounds.min_bytes, bounds.max_bytes or MAX_BYTES
        return lambda value: _check_size(len(value), least, most, "bytes")
    if field.enum_type is not None:
        return _of_enum(field.enum_type, bounds)
    return _of_number(field, bounds)


def _of_message(
    described: Descriptor, bounds: options_pb2.Bounds, purpose: _Purpose, *, own: bool
) -> Look | None:
    if described.full_name in _SECONDS:
        return partial(_check_time, bounds) if own else None
    inner = _look_at(described, purpose) if _concerns(described, purpose) else None
    most = bounds.max_bytes if own else 0
    if not most:
        return inner

    def look(message: Message) -> None:
        _check_size(message.ByteSize(), 0, most, "bytes")
        if inner is not None:
            inner(message)

    return look


def _of_many(field: FieldDescriptor, bounds: options_pb2.Bounds, purpose: _Purpose, *, own: bool) -> Look:
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    name, least = field.name, bounds.min_items
    most = bounds.max_items or (MAX_ENTRIES if is_map else MAX_ITEMS)
    of_many = _of_entries if is_map else _of_elements
    each = of_many(field, bounds, purpose, own=own)

    def look(held: Collection[Any]) -> None:
        count = len(held)
        if not least <= count <= most:
            if own:
                _check_size(count, least, most, "elements")
            return  # refused by whom it concerns: it is not read to its end
        if count and each is not None:
            each(held)
        if bounds.unique and (again := count - len(set(held))):
            raise _Outside(f"has {count} elements, {again} of them again", "each once")

    def shorten(message: Message) -> None:
        del getattr(message, name)[most:]
        look(getattr(message, name))

    def first(message: Message) -> None:
        look(getattr(message, name)[:most])

    if bounds.clamped:
        return shorten if purpose.cuts else first
    return look


def _of_elements(
    field: FieldDescriptor, bounds: options_pb2.Bounds, purpose: _Purpose, *, own: bool
) -> Look | None:
    single = _of_value(field, bounds, purpose, own=own)
    if single is None:
        return None
    look, fit = single, _fit(field, bounds, purpose)
    # As a list, since one of protobuf's makes its elements anew whenever it is gone through.
    return lambda held: _check_each(look, fit, list(held))


def _of_entries(
    field: FieldDescriptor, bounds: options_pb2.Bounds, purpose: _Purpose, *, own: bool
) -> Look | None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    of_key = _of_value(key, bounds, purpose, own=own)
    of_value = _of_value(value, options_pb2.Bounds(), purpose, own=own)

    def look(held: Mapping[Any, Any]) -> None:
        if of_key is not None:
            _check_each(of_key, None, held)
        for name, value in held.items() if of_value is not None else ():
            try:
                of_value(value)  # type: ignore[misc]
            except _Outside as error:
                raise error.within(f"[{str(name)[:_SHOWN]}]") from None

    return look


def _check_each(single: Look, fit: _Fit | None, values: Collection[Any]) -> None:
    if fit is not None and fit(values):
        return
    index = 0
    try:
        for index, value in enumerate(values):  # noqa: B007 - read when one is refused
            single(value)
    except _Outside as error:
        raise error.within(f"[{index}]") from None


def _fit(field: FieldDescriptor, bounds: options_pb2.Bounds, purpose: _Purpose) -> _Fit | None:
    """Looks at a list at once, without a call of ours for each value; None where each must be looked at."""
    if field.message_type is None:
        return _values_fit(field, bounds)
    if bounds.max_bytes or field.message_type.full_name in _SECONDS:
        return None
    columns = []
    for _, _, inner, its in _checks(field.message_type, purpose):
        fit = None if inner.is_repeated or inner.has_presence or its.clamped else _values_fit(inner, its)
        if fit is None:
            return None
        columns.append((attrgetter(inner.name), fit))

    def messages_fit(messages: Collection[Message]) -> bool:
        for take, fit in columns:  # noqa: SIM110 - half the time of `all` for a handful of messages
            if not fit(list(map(take, messages))):
                return False
        return True

    return messages_fit


def _values_fit(field: FieldDescriptor, bounds: options_pb2.Bounds) -> _Fit | None:
    if field.enum_type is not None:
        return frozenset(_allowed(field.enum_type, bounds)).issuperset
    if field.type == FieldDescriptor.TYPE_STRING and not bounds.max_bytes:
        least, most = _lengths(bounds)
        matches = re.compile(bounds.pattern).fullmatch if bounds.pattern else None

        def texts_fit(values: Collection[str]) -> bool:
            distinct = set(values)
            sizes = list(map(len, distinct))
            if min(sizes) < least or max(sizes) > most:
                return False
            if matches is not None:
                return all(map(matches, distinct))
            return bounds.multiline or "".join(distinct).isprintable()

        return texts_fit
    if field.cpp_type in (*_FIGURES, *_WIDE, FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_INT32):
        smallest, largest = _limits(bounds, math.inf if field.cpp_type in _FIGURES else MAX_INTEGER)
        # A sum is finite only if all are, and what is no number compares as nothing.
        return lambda values: (
            math.isfinite(sum(values)) and smallest <= min(values) and max(values) <= largest
        )
    return None


def _check_size(size: int, least: int, most: int, unit: str) -> None:
    if not least <= size <= most:
        raise _Outside(f"has {size} {unit}", _range(least or -math.inf, most))


def _range(least: float, most: float, unit: str = "") -> str:
    if least == most:
        return f"which must be {most:.17g}{unit}"
    if math.isfinite(least) and math.isfinite(most):
        return f"which must be {least:.17g} to {most:.17g}{unit}"
    return f"at most {most:.17g}{unit}" if math.isfinite(most) else f"at least {least:.17g}{unit}"


def _quoted(value: str) -> str:
    text = repr(value)
    return f"is {text}" if len(text) <= _SHOWN else f"is {text[:_SHOWN]}…"


def _of_text(bounds: options_pb2.Bounds) -> Look:
    (least, most), most_bytes, lines = _lengths(bounds), bounds.max_bytes, bounds.multiline
    fits = re.compile(bounds.pattern).fullmatch if bounds.pattern else None

    def look(value: str) -> None:
        if not least <= len(value) <= most:
            _check_size(len(value), least, most, "characters")
        if most_bytes and len(value) * 4 > most_bytes:
            _check_size(len(value.encode()), 0, most_bytes, "bytes")
        if fits is not None:
            if not fits(value):
                raise _Outside(_quoted(value), f"which must match {bounds.pattern}")
        elif not (value.isprintable() or lines) and _SEPARATOR.search(value):
            raise _Outside(_quoted(value), "which may have no control characters and no line breaks")

    return look


def _lengths(bounds: options_pb2.Bounds) -> tuple[int, int]:
    return bounds.min_len, bounds.max_len or (
        MAX_INTEGER if bounds.pattern or bounds.max_bytes else MAX_CHARACTERS
    )


def _of_enum(enum: EnumDescriptor, bounds: options_pb2.Bounds) -> Look:
    names = {number: value.name for number, value in enum.values_by_number.items()}
    allowed = _allowed(enum, bounds)

    def look(value: int) -> None:
        if value not in allowed:
            wanted = ", ".join(allowed[number] for number in sorted(allowed))
            raise _Outside(f"is {names.get(value, value)}", f"which must be one of {wanted}")

    return look


def _allowed(enum: EnumDescriptor, bounds: options_pb2.Bounds) -> dict[int, str]:
    most = bounds.max if bounds.HasField("max") else math.inf
    known = enum.values_by_number.items()
    return {number: value.name for number, value in known if bounds.min <= number <= most}


def _of_number(field: FieldDescriptor, bounds: options_pb2.Bounds) -> Look | None:
    is_figure = field.cpp_type in _FIGURES
    least, most = _limits(bounds, math.inf if is_figure else MAX_INTEGER)
    if not (is_figure or field.cpp_type in _WIDE or bounds.HasField("min") or bounds.HasField("max")):
        return None  # a double holds every value of its type

    def look(value: float) -> None:
        if not least <= value <= most or (is_figure and math.isinf(value)):
            if not math.isfinite(value):
                raise _Outside(f"is {value}", "which must be a finite number")
            at_least = least if bounds.HasField("min") or value < least else -math.inf
            raise _Outside(
                f"is {value}", _range(at_least, most if value > most or bounds.HasField("max") else math.inf)
            )

    return look


def _limits(bounds: options_pb2.Bounds, infinite: float) -> tuple[float, float]:
    least = bounds.min if bounds.HasField("min") else -infinite
    return least, bounds.max if bounds.HasField("max") else infinite


def _check_time(bounds: options_pb2.Bounds, time: Duration | Timestamp) -> None:
    described = time.DESCRIPTOR.full_name
    earliest, latest = _SECONDS[described]
    if not earliest <= time.seconds <= latest:
        raise _Outside(f"is {time.seconds}", _range(earliest, latest)).within("seconds")
    # The nanos of a moment count forward whatever its sign, those of a duration have its sign.
    sign = 1 if described == "google.protobuf.Timestamp" else time.seconds
    if not -_PER_S < time.nanos < _PER_S or sign * time.nanos < 0:
        raise _Outside(f"is {time.nanos}", "which must be a part of a second, of its sign").within("nanos")
    least, most = _limits(bounds, math.inf)
    seconds = time.seconds + time.nanos / _PER_S
    if not least <= seconds <= most:
        raise _Outside(f"is {seconds:g} s", _range(least, most, " s"))


def _bring(field: FieldDescriptor, bounds: options_pb2.Bounds, message: Message) -> None:
    """Bring the value of a `clamped` field to its bound."""
    name = field.name
    if field.has_presence and not message.HasField(name):
        return
    value = getattr(message, name)
    if field.type == FieldDescriptor.TYPE_STRING:
        if len(value) > bounds.max_len or not (bounds.multiline or value.isprintable()):
            value = value[: bounds.max_len]
            setattr(message, name, value if bounds.multiline else _SEPARATOR.sub(" ", value))
        return
    least, most = _limits(bounds, math.inf)
    if field.message_type is not None:
        _check_time(options_pb2.Bounds(), value)
        seconds = value.seconds + value.nanos / _PER_S
        if not least <= seconds <= most:
            value.FromMilliseconds(int(min(max(seconds, least), most) * 1000))
    elif not (least <= value <= most and math.isfinite(value)):
        bounded = min(max(value, least), most) if math.isfinite(value) else least
        setattr(message, name, bounded if field.cpp_type in _FIGURES else int(bounded))
