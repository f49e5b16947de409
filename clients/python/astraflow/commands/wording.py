"""How answers of the contract are shown: JSON with stable names for programs, aligned text for people.

Invariant: JSON has exactly the fields of the contract's message, by these rules: `x_duration` becomes `x_s` in
seconds, times are RFC 3339, enum values lose their prefix and are lower case, bytes are hex, what is unset or
not a number is null. Used by every command of this package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.table import Table
from rich.text import Text

from astraflow._contract.printable import printable, printable_json

if TYPE_CHECKING:
    from google._upb import _message
    from google.protobuf import descriptor
    from rich.segment import Segment

    Field: TypeAlias = descriptor.FieldDescriptor | _message.FieldDescriptor
    Enum: TypeAlias = descriptor.EnumDescriptor | _message.EnumDescriptor

_PIPED_WIDTH = 160
_MINUTE_S, _HOUR_S = 60, 3600
_BARS = "▁▂▃▄▅▆▇█"


def as_json(message: Message) -> dict[str, Any]:
    """Return a message as what `json.dumps` takes."""
    return {_json_name(field): _field_value(message, field) for field in message.DESCRIPTOR.fields}


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document on stdout."""
    typer.echo(printable_json(json.dumps(value, indent=2, ensure_ascii=False)))


def say(text: str, *, err: bool = False) -> None:
    """Print a line for people, in which nothing that others wrote acts on their terminal."""
    typer.echo(printable(text), err=err)


@dataclass(frozen=True)
class Printable:
    """What is shown, printable and no markup: what models, tasks and exceptions say cannot act on a terminal."""

    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield it as pieces of the screen."""
        for segment in console.render(self.shown, options.update(markup=False)):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class _Printing(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Printable(each) for each in renderables]


def terminal(*, stderr: bool = False, width: int | None = None, file: IO[str] | None = None) -> Console:
    """Return a console on which all that is printed is `Printable`; what a `Live` on it shows must be made so."""
    made = Console(highlight=False, markup=False, emoji=False, stderr=stderr, width=width, file=file)
    made.push_render_hook(_Printing())
    return made


def console() -> Console:
    """Return where text for people goes; a pipe gets whole lines whatever the terminal's width."""
    found = terminal()
    return found if found.is_terminal else terminal(width=_PIPED_WIDTH)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an unframed table; columns named in `right` are aligned to the right."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def origin_text(policy_id: str, *, run: str, policy: str, version: int, step: int | None) -> str:
    """Return which version of another run a policy started with."""
    after = "" if step is None else f", after step {step}"
    return f"{policy_id} starts with version {version} of policy {policy} of run {run}{after}"


def heading(text: str) -> Text:
    """Return the line above a block."""
    return Text(f"\n{text}", style="bold")


def span_text(seconds: float) -> str:
    """Return a length of time as people say it."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds // _MINUTE_S:.0f} min {seconds % _MINUTE_S:02.0f} s"
    return f"{seconds // _HOUR_S:.0f} h {seconds % _HOUR_S // _MINUTE_S:02.0f} min"


def count_text(number: int) -> str:
    """Return a count with its thousands set apart."""
    return f"{number:,}"


def number_text(value: float, *, digits: int = 3) -> str:
    """Return a figure; a dash where there is none yet."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def sparkline(values: Iterable[float], *, width: int = 40, low: float = 0.0, high: float = 1.0) -> str:
    """Return the last `width` values as block characters between `low` and `high`; NaN is a blank."""
    span = (high - low) or 1.0
    cells = []
    for value in list(values)[-width:]:
        if math.isnan(value):
            cells.append(" ")
            continue
        level = min(1.0, max(0.0, (value - low) / span))
        cells.append(_BARS[round(level * (len(_BARS) - 1))])
    return "".join(cells)


def seconds_of(duration: Duration | Timestamp) -> float:
    """Return a protobuf duration, or a time since the Unix epoch, in seconds."""
    return duration.ToNanoseconds() / 1e9


def _json_name(field: Field) -> str:
    name: str = field.name
    is_duration = (
        field.message_type is not None and field.message_type.full_name == Duration.DESCRIPTOR.full_name
    )
    return f"{name.removesuffix('_duration')}_s" if is_duration else name


def _field_value(message: Message, field: Field) -> Any:  # noqa: ANN401 - JSON
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _single(value[key], inner) for key in sorted(value)}
    if field.is_repeated:
        return [_single(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(value, field)


def _single(value: Any, field: Field) -> Any:  # noqa: ANN401 - one value of any protobuf type
    if isinstance(value, Duration):
        return seconds_of(value)
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return as_json(value)
    if field.enum_type is not None:
        return enum_text(field.enum_type, value)
    if isinstance(value, bytes):
        return value.hex()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def enum_text(kind: Enum, number: int) -> str:
    """Return an enum value's name without the prefix that all names of its enum share, in lower case."""
    known = kind.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix: str = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    name: str = known.name
    return name.removeprefix(prefix).lower()
