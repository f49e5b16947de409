"""Prompts with places to fill in, for workflows whose roles read what other roles wrote, and long ones.

Invariant: filling changes the named places only, in one pass: braces of LaTeX or JSON stay, in the template and in what
is filled in.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from astraflow.plugins import Message

_LONG_CHARS = 16_384
"""Tokenising more than this would hold up the event loop."""

T = TypeVar("T")


def problem_of(messages: Sequence[Message]) -> str:
    """Return what a task asks, for another role to read: its messages without the instructions of the system."""
    return "\n\n".join(message.content for message in messages if message.role != "system")


def fill(template: str, **values: str) -> str:
    """Return `template` with every `{name}` of `values` replaced."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda place: values[place[1]], template)


def require_places(setting: str, template: str, *names: str) -> None:
    """Raise ValueError unless `template`, the value of `setting`, has a place `{name}` for each of `names`."""
    missing = [f"{{{name}}}" for name in names if f"{{{name}}}" not in template]
    if missing:
        raise ValueError(f"{setting} has no {' and no '.join(missing)}, got {template!r}; add it")


async def off_the_loop_if_long(messages: Sequence[Message], add: Callable[[], T]) -> T:
    """Return what `add`, which tokenises `messages`, returns; long ones in a thread."""
    if sum(len(message.content) for message in messages) > _LONG_CHARS:
        return await asyncio.to_thread(add)
    return add()
