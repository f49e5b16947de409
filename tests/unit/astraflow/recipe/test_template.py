"""`astraflow recipe init`: a recipe in a new folder that needs no checkout, whole or not there at all."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from astraflow.recipe.command import app
from astraflow.recipe.file import load_recipe, parse_recipe
from astraflow.recipe.shipped import shipped_recipes
from astraflow_launcher.support import recipe_trial
from support import cli


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and logs that the trial of a recipe's code leaves alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_trial, "configure", lambda *_, **__: None)


VARIANTS = {"math-efficient-data", "math-multi-agent", "code-multi-agent", "planner-worker", "sft", "distill"}
"""Another recipe with a few keys changed."""


@pytest.mark.parametrize("source", [name for name in shipped_recipes() if name not in VARIANTS])
def test_a_new_recipe_is_the_shipped_one_under_its_own_name(source: str) -> None:
    made = cli.run("recipe", "init", "my-task", "--from", source, "--json")
    assert made.status == 0, made.errors
    assert {"recipe.yaml", "recipe.py", "README.md", ".recipe.schema.json"} <= set(made.json["files"])
    recipe, shipped = load_recipe(Path("my-task")), load_recipe(Path(source))
    assert recipe.recipe.run.name == "my-task"
    named = parse_recipe(shipped.yaml_text, overrides=["run.name=my-task"])
    assert recipe.recipe == named.recipe
    assert recipe.code_sha256 == shipped.code_sha256
    assert [path.name for path in Path().iterdir()] == ["my-task"]


def test_it_passes_its_check_and_editors_find_the_schema() -> None:
    told = cli.run("recipe", "init", "my-task")
    assert "astraflow dev my-task" in told.errors
    assert CliRunner().invoke(app, ["check", "my-task"]).exit_code == 0
    first = Path("my-task/recipe.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=.recipe.schema.json"
    assert "properties" in json.loads(Path("my-task/.recipe.schema.json").read_text())
    assert "astraflow dev my-task" in Path("my-task/README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["My Task"], "use lower-case letters, digits and dashes"),
        (["full"], "full is not empty; give a new name"),
        (["file"], "file is not empty; give a new name"),
        (["file/task"], "cannot be written"),
        (
            ["task", "--from", "math-multi-agent"],
            "that recipe is math with a few keys changed; begin with --from math",
        ),
        (
            ["task", "--from", "quickstar"],
            "--from quickstar: no recipe of this release; there are agent-tiny",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_touched(arguments: list[str], words: str) -> None:
    Path("full").mkdir()
    Path("full/mine").touch()
    Path("file").touch()
    ended = cli.run("recipe", "init", *arguments)
    assert (ended.status, words in ended.errors) == (2, True), ended.errors
    assert sorted(str(path) for path in Path().rglob("*")) == ["file", "full", "full/mine"]
