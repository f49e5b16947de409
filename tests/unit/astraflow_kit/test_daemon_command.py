"""The command of a daemon: what typer is told of a settings class, and how a start ends."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from typer.testing import CliRunner, Result

from astraflow.errors import NotFoundError, UnavailableError
from astraflow_kit.daemon_command import daemon_command
from astraflow_kit.settings import CommandOption, ProcessSettings


class Speed(Enum):
    """How fast."""

    SLOW = "slow"
    FAST = "fast"


class Example(ProcessSettings):
    """Every kind of setting there is."""

    join: Annotated[str, CommandOption("The run", names=("--to", "--join"), metavar="HOST:PORT")]
    """Address of
    the server."""
    steps: int = 3
    patience_s: float | None = None
    folder: Path = Path("/tmp")
    words: tuple[str, ...] = ()
    """Words."""
    mode: Literal["a", "b"] = "a"
    speed: Annotated[Speed, CommandOption("Tuning")] = Speed.SLOW
    quick: bool = False
    polite: bool = True


def check(settings: Example) -> Mapping[str, object]:
    """Look, then exit."""
    return {"join": settings.join, "steps": settings.steps}


def started(*arguments: str) -> tuple[Result, list[Example]]:
    """`example ARGUMENTS`, and the settings that ran."""
    ran: list[Example] = []

    def run(settings: Example) -> int:
        ran.append(settings)
        if settings.join == "nobody":
            raise NotFoundError("nobody is not there; name somebody")
        if settings.join == "asleep":
            raise UnavailableError("asleep does not answer")
        return 7

    app = daemon_command(Example, name="example", about="An example.", run=run, check=check)
    return CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1"}).invoke(app, list(arguments)), ran


def test_options_become_settings() -> None:
    ended, (settings,) = started(
        *("--to", "here", "--steps", "4", "--patience-s", "1.5", "--folder", "/var", "--mode", "b"),
        *("--words", "one", "--words", "two", "--speed", "fast", "--quick", "--no-polite"),
    )
    assert ended.exit_code == 7
    given = settings.model_dump(include=set(Example.__annotations__))
    assert list(given.values()) == [
        *("here", 4, 1.5, Path("/var"), ("one", "two"), "b", Speed.FAST, True, False)
    ]


def test_what_is_not_given_comes_from_variables_or_from_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"QUICK": "true", "POLITE": "false", "WORDS": '["x"]', "STEPS": "9"}.items():
        monkeypatch.setenv(f"ASTRAFLOW_{name}", value)
    _, (settings,) = started("--join", "here", "--steps", "5")
    assert (settings.steps, settings.quick, settings.polite, settings.words, settings.mode) == (
        *(5, True, False, ("x",), "a"),
    )


def test_the_help_says_what_the_settings_say() -> None:
    ended, _ = started("-h")
    lines = [" ".join(line.strip("│╭╮╰╯─ ").split()) for line in ended.stdout.splitlines()]
    assert lines[lines.index("The run") : lines.index("Process and log")] == [
        "The run",
        "--to,--join HOST:PORT Address of the server. Required.",
        "--steps <int> Default: 3.",
        "--patience-s <float>",
        "--folder <path> Default: /tmp.",
        "--words <list[str]> Words.",
        "--mode a|b Default: a.",
        "",
        "Tuning",
        "--speed slow|fast Default: slow.",
        "--quick <bool>",
        "--polite --no-polite <bool>",
        "",
    ]
    assert "--check <bool> Look, then exit." in lines
    assert "An example." in lines
    assert "Every option can also be given as a variable, such as ASTRAFLOW_JOIN." in lines
    assert "--failpoints" not in ended.stdout


def test_a_hidden_option_is_taken() -> None:
    _, (settings,) = started("--join", "here", "--failpoints-seed", "5")
    assert settings.failpoints_seed == 5


def test_a_check_says_what_it_found_and_runs_nothing() -> None:
    ended, ran = started("--join", "here", "--check")
    assert (ended.exit_code, ended.stdout, ran) == (0, "join: here\nsteps: 3\n", [])


MANY, MISSPELT = ("--join", "here", "--steps", "many"), ("--join", "here", "--step", "4")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "ASTRAFLOW_JOIN"),
        (MANY, 2, "Invalid value for '--steps': Input should be a valid integer"),
        (("--join", "here", "--mode", "c"), 2, "INVALID_SETTINGS: option mode = 'c'"),
        (MISSPELT, 2, "No such option: --step (Possible options: --help, --speed, --steps)"),
        (("--join", "nobody"), 2, "NOT_FOUND: nobody is not there; name somebody"),
        (("--join", "asleep"), 75, "UNAVAILABLE: asleep does not answer"),
    ],
)
def test_what_is_wrong_is_said_and_sets_a_status(arguments: tuple[str, ...], status: int, words: str) -> None:
    ended, _ = started(*arguments)
    assert ended.exit_code == status
    assert words in " ".join(ended.stderr.replace("│", " ").split())
    assert "Traceback" not in ended.output
