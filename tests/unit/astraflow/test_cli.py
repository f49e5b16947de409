"""The command line says what to do next: the nearest command, the missing extra, the error and its status."""

import ast
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import astraflow
from astraflow import cli, errors
from support.cli import Ended, run

Add = Callable[..., None]
RAISES = """
import typer
from astraflow import errors
app = typer.Typer()
@app.command()
def extra(): raise {}
"""


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Add:
    """Adds the subcommand `extra` whose module holds the given source."""

    def add(source: str, *, extra: str = "raas") -> None:
        (tmp_path / "module_of_extra_command.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "module_of_extra_command", raising=False)
        command = cli.Subcommand("module_of_extra_command", "Only for a test.", extra, "Start here")
        monkeypatch.setitem(cli.COMMANDS, "extra", command)

    return add


def test_the_version_is_printed() -> None:
    assert run("--version") == Ended(0, f"astraflow {astraflow.__version__}\n", "")


def test_help_lists_every_command_with_its_summary() -> None:
    shown = run("--help").output
    assert [name for name, command in cli.COMMANDS.items() if f"{name} " not in shown] == []
    assert [name for name, command in cli.COMMANDS.items() if command.summary not in shown] == []


NEAREST = [("dve", "did you mean `dev`?"), ("zzz", "known: dev, eval, doctor")]


@pytest.mark.parametrize(("typed", "words"), NEAREST)
def test_an_unknown_command_names_the_nearest_one(typed: str, words: str) -> None:
    ended = run(typed)
    assert ended.status == cli.USAGE_ERROR
    assert words in ended.errors


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_where_the_table_says(name: str) -> None:
    found = importlib.util.find_spec(cli.COMMANDS[name].module)
    assert found is not None
    assert found.origin is not None
    # Read, not imported: some of them load torch.
    tree = ast.parse(Path(found.origin).read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    assert "app" in [ast.unparse(target) for node in assigned for target in node.targets]


@pytest.mark.parametrize(("extra", "wanted"), [("raas", "'astraflow[raas]'"), ("", "astraflow")])
def test_a_missing_dependency_is_told_with_the_line_that_installs_it(
    add_command: Add, extra: str, wanted: str
) -> None:
    add_command("import surely_not_installed.deeply", extra=extra)
    ended = run("extra")
    assert ended.status == cli.USAGE_ERROR
    assert "`astraflow extra` needs the package 'surely_not_installed'" in ended.errors
    assert ended.errors.endswith(f"pip install {wanted}\n")
    assert "Traceback" not in ended.errors


def test_a_module_of_ours_that_is_missing_is_a_defect_and_not_a_dependency(add_command: Add) -> None:
    add_command("import module_of_extra_command.gone")
    with pytest.raises(ModuleNotFoundError, match="gone"):
        run("extra")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.RecipeError, 2),
        (errors.PluginError, 2),
        (errors.UnavailableError, 75),
        (errors.DeadlineError, 75),
        (errors.FencedError, 1),
        (errors.InternalError, 1),
    ],
)
def test_a_known_error_ends_with_its_message_and_status(
    add_command: Add, kind: type[errors.AstraflowError], status: int
) -> None:
    add_command(RAISES.format(f"errors.{kind.__name__}('3 exceeds 2; lower it')"))
    assert run("extra") == Ended(status, "", f"{kind.reason}: 3 exceeds 2; lower it\n")


def test_a_defect_keeps_its_traceback(add_command: Add) -> None:
    add_command(RAISES.format("KeyError('gone')"))
    with pytest.raises(KeyError, match="gone"):
        run("extra")


def test_what_a_server_of_the_test_logs_meanwhile_is_not_what_a_command_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, logged = threading.Event(), threading.Event()

    def serve() -> None:
        runs.wait()
        sys.stdout.write("server.started\n")
        logged.set()

    def command() -> None:
        runs.set()
        logged.wait()
        sys.stdout.write("its answer\n")

    server = threading.Thread(target=serve)
    server.start()
    monkeypatch.setattr(cli, "main", command)
    assert run("status").output == "its answer\n"
    server.join()
    assert capsys.readouterr().out == "server.started\n"
