"""Options that several commands share, declared once: a parameter that is a dataclass stands for one option per field.

Called at import by the modules that declare commands, below the typer decorator.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as typer must see it: with the fields of its dataclass parameters in their places.

    Fields need defaults and are annotated as options are. The command itself is called with the dataclasses.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    shown: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name not in groups:
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        options = get_type_hints(groups[name], include_extras=True)
        shown += [
            Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name]
            )
            for field in fields(groups[name])
        ]

    @wraps(command)
    def call(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    call.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call
