"""A command's shared options stand in its signature one by one, and reach it as one object."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from astraflow.commands.options import grouped_options


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a command is about."""

    name: Annotated[str, typer.Option(help="Whom to greet.")] = "world"
    loud: Annotated[bool, typer.Option("--loud")] = False


app = typer.Typer()


@app.command()
@grouped_options
def greet(times: Annotated[int, typer.Argument()], named: Named, mark: str = "!") -> None:
    """Greet somebody."""
    text = f"hello {named.name}{mark}" * times
    typer.echo(text.upper() if named.loud else text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["1"], "hello world!"),
        (["2", "--name", "you", "--mark", "?"], "hello you?hello you?"),
        (["1", "--loud"], "HELLO WORLD!"),
    ],
)
def test_the_fields_of_a_dataclass_are_options(arguments: list[str], expected: str) -> None:
    assert CliRunner().invoke(app, arguments).output.strip() == expected


def test_help_tells_them_beside_the_commands_own() -> None:
    shown = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    told = ("--name", "Whom to greet.", "--loud", "--mark", "Greet somebody.")
    assert [words for words in told if words not in shown] == []
