"""Options that commands share reach each of them as one value, beside its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from astraflow.commands.option_groups import grouped_options


@dataclass(frozen=True, kw_only=True)
class Colour:
    """A group of options."""

    red: Annotated[int, typer.Option(min=0, max=255)] = 0
    dim: Annotated[bool, typer.Option("--dim")] = False


@dataclass(frozen=True, kw_only=True)
class Paint(Colour):
    """A group that begins with another."""

    coats: int = 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("wall",), "wall 0 Paint(red=0, dim=False, coats=1)"),
        (("wall", "--red", "7", "--dim", "--coats", "2"), "wall 0 Paint(red=7, dim=True, coats=2)"),
        (("--litres", "3", "door", "--coats", "2"), "door 3 Paint(red=0, dim=False, coats=2)"),
    ],
)
def test_a_command_gets_its_group_and_its_own_arguments(arguments: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(app(), list(arguments))
    assert (ended.exit_code, ended.output) == (0, f"{said}\n")


@pytest.mark.parametrize("arguments", [(), ("wall", "--red", "256"), ("wall", "--blue", "1")])
def test_what_is_missing_wrong_or_unknown_is_refused(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app(), list(arguments)).exit_code == 2


def test_the_help_is_the_commands_own() -> None:
    shown = CliRunner().invoke(app(), ["--help"]).output
    assert "Paint something." in shown
    assert [
        name for name in ("thing", "--litres", "--red", "--dim", "--coats") if name not in shown.lower()
    ] == []


def app() -> typer.Typer:
    """A command of one argument, one option and a group."""
    made = typer.Typer()

    @made.command()
    @grouped_options
    def paint(
        how: Paint, thing: Annotated[str, typer.Argument()], litres: Annotated[int, typer.Option()] = 0
    ) -> None:
        """Paint something."""
        typer.echo(f"{thing} {litres} {how}")

    return made
