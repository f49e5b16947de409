"""The command of a daemon, made from its settings class: an option per setting, its help, `--check`, exit status.

Invariant: a setting is declared once, beside its bounds and its docstring. An option that is not given leaves the
setting to its `ASTRAFLOW_*` variable and then to its default; whatever is wrong ends the process with one sentence
and the status of its kind. Built by the `__main__` of each daemon, which imports what is heavy in `run` and `check`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from astraflow.errors import AstraflowError
from astraflow_kit import lifecycle
from astraflow_kit.settings import ENV_PREFIX, CommandOption, ProcessSettings, load

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = ["daemon_command"]

S = TypeVar("S", bound=ProcessSettings)
_CONTEXT = {"help_option_names": ["-h", "--help"]}
_PARSED = (bool, int, float, Path)
_VARIABLES = f"Every option can also be given as a variable, such as {ENV_PREFIX}%s."


def daemon_command(
    kind: type[S],
    *,
    name: str,
    about: str,
    run: Callable[[S], int],
    check: Callable[[S], Mapping[str, object]],
) -> typer.Typer:
    """Return the command NAME: `run(settings)` ends with the process' status, `check(settings)` says what it found.

    Both are called after the log was configured; an AstraflowError they raise is shown, and sets the status.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

    def command(**given: Any) -> None:
        only_check = given.pop("check")
        options = {key: value for key, value in given.items() if value not in (None, [])}
        raise typer.Exit(_start(kind, options, name=name, act=_told(check) if only_check else run))

    parameters = [*_parameters(kind), _check_parameter(check)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    variable = next(iter(_by_owner(kind))).upper()
    app.command(name, help=f"{about}\n\n{_VARIABLES % variable}", context_settings=_CONTEXT)(command)
    return app


def _start(kind: type[S], options: Mapping[str, object], *, name: str, act: Callable[[S], int]) -> int:
    try:
        settings = load(kind, options)
        lifecycle.begin(name, settings)
        return act(settings)
    except AstraflowError as error:
        typer.echo(f"{error.reason}: {error.message}", err=True)
        return lifecycle.exit_code_of(error)


def _told(check: Callable[[S], Mapping[str, object]]) -> Callable[[S], int]:
    def act(settings: S) -> int:
        for key, value in check(settings).items():
            typer.echo(f"{key}: {value}")
        return lifecycle.ExitCode.OK

    return act


def _check_parameter(check: Callable[..., object]) -> inspect.Parameter:
    option = typer.Option("--check", help=inspect.getdoc(check), rich_help_panel=_LAST_PANEL)
    return _parameter("check", bool, option, default=False)


_LAST_PANEL = "Process and log"


def _parameters(kind: type[ProcessSettings]) -> Iterator[inspect.Parameter]:
    """One per setting, a class's own settings before inherited ones; a panel goes on until the next begins."""
    panel = ""
    for name in _by_owner(kind):
        field = kind.model_fields[name]
        looks = next((item for item in field.metadata if isinstance(item, CommandOption)), CommandOption())
        panel = looks.panel or panel
        parsed = _parsed_type(field.annotation)
        option = typer.Option(
            *(looks.names or _names(name, field)),
            metavar=looks.metavar or _choices(field.annotation),
            help=_help(field, is_flag=parsed is bool),
            rich_help_panel=panel,
            hidden=looks.hidden,
        )
        yield _parameter(name, parsed | None, option, default=None)


def _parameter(name: str, kind: Any, option: Any, *, default: object) -> inspect.Parameter:  # noqa: ANN401 - typer's own
    """A keyword parameter whose type typer reads."""
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _by_owner(kind: type[ProcessSettings]) -> list[str]:
    """Names of the settings: those of the class itself first, then those of each base."""

    def distance(name: str) -> int:
        owners = [place for place, base in enumerate(kind.__mro__) if name in inspect.get_annotations(base)]
        return owners[-1]

    return sorted(kind.model_fields, key=distance)


def _names(name: str, field: FieldInfo) -> tuple[str, ...]:
    option = f"--{name.replace('_', '-')}"
    # A flag that is on unless told otherwise needs a way to turn it off; the others are only ever turned on.
    return (f"{option}/--no-{option[2:]}",) if field.default is True else (option,)


def _parsed_type(annotation: Any) -> Any:  # noqa: ANN401 - a type expression
    """What typer parses; anything else stays text, which pydantic takes."""
    if get_origin(annotation) is Annotated:
        return _parsed_type(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return list[str]
    inside = [_parsed_type(part) for part in get_args(annotation) if part is not type(None)]
    return next((kind for kind in (annotation, *inside) if kind in _PARSED or kind == list[str]), str)


def _choices(annotation: Any) -> str | None:  # noqa: ANN401 - a type expression
    """The values of a Literal or an Enum, to be shown in place of the type."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return "|".join(map(str, get_args(part)))
    return "|".join(item.value for item in annotation) if hasattr(annotation, "__members__") else None


def _help(field: FieldInfo, *, is_flag: bool) -> str:
    text = " ".join((field.description or "").split())
    if field.is_required():
        return f"{text} Required."
    default = getattr(field.default, "value", field.default)
    default = f"{default:g}" if isinstance(default, float) else default
    return text if is_flag or default in (None, "", ()) else f"{text} Default: {default}."
