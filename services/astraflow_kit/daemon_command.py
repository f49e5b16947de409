"""The command of a daemon, made from its settings class: an option per setting, its help, `--check`, exit status.

Invariant: a setting is declared once, beside its bounds and its docstring. An option that is not given leaves the
setting to its `ASTRAFLOW_*` variable and then to its default; whatever is wrong ends the process with one sentence
and the status of its kind. Built by the `__main__` of each daemon, which imports what is heavy in `run` and `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, Signature, get_annotations, getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from astraflow.errors import AstraflowError
from astraflow_kit import lifecycle
from astraflow_kit.settings import (
    ENV_PREFIX,
    CommandOption,
    DaemonSettings,
    ProcessSettings,
    SettingsError,
    load,
)

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

S = TypeVar("S", bound=ProcessSettings)
_CONTEXT = {"help_option_names": ["-h", "--help"]}
_PARSED = (bool, int, float, Path, list[str])


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
    options = dict(_options(kind))
    variables = (
        f"Every option can also be given as a variable, such as {ENV_PREFIX}{next(iter(options)).upper()}."
    )
    *_, panel = (option.rich_help_panel for option in options.values())
    options["check"] = typer.Option("--check", help=getdoc(check), rich_help_panel=panel)
    types = {key: Annotated[_parsed_type(kind, key) | None, option] for key, option in options.items()}

    def command(**given: Any) -> None:
        only_check = given.pop("check")
        try:
            _refuse_secrets(kind, given)
            settings = load(kind, {key: value for key, value in given.items() if value not in (None, [])})
            lifecycle.begin(name, settings)
            _require_usable(settings)
            status = _show(check(settings)) if only_check else run(settings)
        except AstraflowError as error:
            typer.echo(f"{error.reason}: {error.message}", err=True)
            status = lifecycle.exit_code_of(error)
        raise typer.Exit(status)

    command.__annotations__ = types
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=types[key]) for key in types]
    )
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command(name, help=f"{about}\n\n{variables}", context_settings=_CONTEXT)(command)
    return app


def _require_usable(settings: ProcessSettings) -> None:
    """Raise SettingsError for keys and certificates that cannot be used, before anything of the daemon has begun."""
    if not isinstance(settings, DaemonSettings):
        return
    if settings.token_keys_file:
        from astraflow_kit.identity.verifier import Verifier

        Verifier(settings)
    if settings.tls_cert_file:
        from astraflow_kit.identity.certificates import ServerCertificate

        ServerCertificate(settings)


def _refuse_secrets(kind: type[ProcessSettings], given: Mapping[str, object]) -> None:
    for name, value in given.items():
        refused = _looks(kind, name).refused
        if value is not None and refused is not None and (why := refused(str(value))):
            raise SettingsError(f"option --{name.replace('_', '-')}: {why}")


def _looks(kind: type[ProcessSettings], name: str) -> CommandOption:
    annotated = kind.model_fields[name].metadata
    return next((item for item in annotated if isinstance(item, CommandOption)), CommandOption())


def _show(found: Mapping[str, object]) -> int:
    for key, value in found.items():
        typer.echo(f"{key}: {value}")
    return lifecycle.ExitCode.OK


def _options(kind: type[ProcessSettings]) -> Iterator[tuple[str, Any]]:
    """One per setting, a class's own settings before inherited ones, after those of a class that says
    `options_come_first`; a panel goes on until the next begins.
    """

    def distance(name: str) -> int:
        bases = [(place, base) for place, base in enumerate(kind.__mro__) if name in get_annotations(base)]
        place, base = bases[-1]
        return -1 if "options_come_first" in vars(base) else place

    panel = ""
    for name in sorted(kind.model_fields, key=distance):
        field = kind.model_fields[name]
        looks = _looks(kind, name)
        panel = looks.panel or panel
        yield (
            name,
            typer.Option(
                *(looks.names or (_usual_name(name, field),)),
                metavar=looks.metavar or _choices(field.annotation),
                help=_help(field),
                rich_help_panel=panel,
                hidden=looks.hidden,
            ),
        )


def _usual_name(name: str, field: FieldInfo) -> str:
    option = name.replace("_", "-")
    # A flag that is on unless told otherwise needs a way to turn it off; the others are only ever turned on.
    return f"--{option}/--no-{option}" if field.default is True else f"--{option}"


def _parsed_type(kind: type[ProcessSettings], name: str) -> Any:  # noqa: ANN401 - a type expression
    """What typer parses; anything else stays text, which pydantic takes."""

    def parsed(annotation: Any) -> Any:  # noqa: ANN401 - the same
        if get_origin(annotation) is tuple:
            return list[str]
        parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
        return next((found for found in (annotation, *map(parsed, parts)) if found in _PARSED), str)

    return bool if name not in kind.model_fields else parsed(kind.model_fields[name].annotation)


def _choices(annotation: Any) -> str | None:  # noqa: ANN401 - a type expression
    """The values of a Literal or an Enum, to be shown in place of the type."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return "|".join(map(str, get_args(part)))
    return "|".join(item.value for item in annotation) if hasattr(annotation, "__members__") else None


def _help(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    if field.is_required():
        return f"{text} Required."
    default = getattr(field.default, "value", field.default)
    default = f"{default:g}" if isinstance(default, float) else default
    return text if isinstance(default, bool) or default in (None, "", ()) else f"{text} Default: {default}."
