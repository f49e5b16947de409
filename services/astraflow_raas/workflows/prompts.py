"""Prompts with places to fill in, for workflows whose roles read what other roles wrote.

Invariant: filling changes the named places only, in one pass: braces of LaTeX or JSON stay, in the template and in what
is filled in. Pure.
"""

import re
from collections.abc import Sequence

from astraflow.plugins import Message


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
