"""Options that several commands share, declared once: the fields of a dataclass that the command receives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

__all__ = ["grouped_options"]


def grouped_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return what typer registers for `command`, whose first parameter is a dataclass: an option for each of its
    fields, after the command's own arguments and options. A field is annotated and has a default as a parameter would.
    """
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    kind: Any = first.annotation
    hints = get_type_hints(kind, include_extras=True)
    shared = [_keyword(field.name, hints[field.name], field.default) for field in fields(kind)]

    def run(**given: Any) -> None:
        command(kind(**{item.name: given.pop(item.name) for item in shared}), **given)

    parameters = [*(_keyword(item.name, item.annotation, item.default) for item in own), *shared]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _keyword(name: str, kind: Any, default: object) -> inspect.Parameter:  # noqa: ANN401 - a type
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
