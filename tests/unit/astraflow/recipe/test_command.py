"""`astraflow recipe` prints what it checked, and refuses what does not hold."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from astraflow.recipe import Recipe, json_schema
from astraflow.recipe.algorithm import AlgorithmSettings, M2po
from astraflow.recipe.command import app
from astraflow.recipe.shipped import shipped_recipes
from astraflow_launcher.support import recipe_trial

QUICKSTART = Path(__file__).parents[4] / "recipes" / "quickstart"


@pytest.fixture(autouse=True)
def logging_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of a recipe's code silences the logs of its process, which are those of the tests here."""
    monkeypatch.setattr(recipe_trial, "configure", lambda *_, **__: None)


def test_check_prints_the_recipe_with_every_default_and_override() -> None:
    finished = CliRunner().invoke(app, ["check", str(QUICKSTART), "--set", "run.steps=7"])
    assert finished.exit_code == 0
    printed = Recipe.model_validate(YAML(typ="safe").load(finished.stdout))
    assert printed.run.steps == 7
    # What the published curves of the quickstart were made with.
    loss = M2po(budget=0.04, floor_low=0.3, floor_high=0.5)
    assert printed.policy("solver").trainer.algorithm == AlgorithmSettings(loss=loss)
    assert "lease_ttl_s" in finished.stdout  # a default that the file does not mention


def test_check_prints_one_json_object_where_asked() -> None:
    finished = CliRunner().invoke(app, ["check", str(QUICKSTART), "--json"])
    printed = json.loads(finished.stdout)
    assert Recipe.model_validate(printed["recipe"]).run.name == "quickstart"
    assert [line.partition(":")[0] for line in printed["tried"]] == [
        *("roles", "data set", "reward", "tokenizer of solver")
    ]
    assert finished.stderr.splitlines() == printed["tried"]


@pytest.mark.parametrize("name", shipped_recipes())
def test_check_accepts_every_shipped_recipe_at_the_size_that_needs_no_data(name: str) -> None:
    small = QUICKSTART.parent / name / "small.yaml"
    finished = CliRunner().invoke(app, ["check", str(small if small.exists() else small.parent)])
    assert finished.exit_code == 0, finished.output
    assert "tokenizer of" in finished.stderr
    named = f"{name}-small" if small.exists() else name
    assert Recipe.model_validate(YAML(typ="safe").load(finished.stdout)).run.name == named


def test_check_names_an_environment_that_is_served_and_goes_on() -> None:
    finished = CliRunner().invoke(app, ["check", str(QUICKSTART.parent / "shop")])
    assert finished.exit_code == 0, finished.output
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("environment ")]
    assert "Shop: served, not tried" in line
    assert "--environment Shop=" in line


def test_show_tells_what_gave_each_value(tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(
        f"extends: {QUICKSTART}/recipe.yaml\nrun: {{steps: 5}}\ntrainer: {{algorithm: {{loss: gspo}}}}\n"
    )
    arguments = ["show", str(small), "--set", "run.seed=3"]
    lines = CliRunner().invoke(app, [*arguments, "--origin"]).stdout.splitlines()
    for line in (
        f'run.name="quickstart"  # {QUICKSTART}/recipe.yaml:4',
        f"run.steps=5  # {small}:2",
        "run.seed=3  # --set run.seed=3",
        f'trainer.algorithm.loss.kind="gspo"  # {small}:3',
        "trainer.algorithm.loss.low=0.0003  # default",
    ):
        assert line in lines
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert printed["origins"]["run.steps"] == f"{small}:2"
    shown = CliRunner().invoke(app, arguments).stdout
    assert Recipe.model_validate(YAML(typ="safe").load(shown)) == Recipe.model_validate(printed["recipe"])


def test_diff_prints_the_keys_that_differ_once_both_are_resolved(tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(
        f"extends: {QUICKSTART}/recipe.yaml\nrun: {{steps: 5}}\n"
        "trainer: {algorithm: {kl: {coefficient: 0.1}}}\n"
    )
    finished = CliRunner().invoke(app, ["diff", str(QUICKSTART), str(small)])
    assert finished.stdout.splitlines() == [
        "run.steps: 50 → 5",
        "trainer.algorithm.kl.coefficient: unset → 0.1",
        'trainer.algorithm.kl.estimator: unset → "k3"',
        'trainer.algorithm.kl.reference: unset → "behavior"',
        'trainer.algorithm.kl.placement: unset → "loss"',
    ]
    assert finished.stderr == "5 keys differ\n"
    printed = json.loads(CliRunner().invoke(app, ["diff", str(QUICKSTART), str(small), "--json"]).stdout)
    assert printed["run.steps"] == {"before": "50", "after": "5"}


def test_without_code_nothing_of_the_recipe_is_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text((QUICKSTART / "recipe.yaml").read_text())
    (tmp_path / "recipe.py").write_text("raise RuntimeError('it was run')")
    finished = CliRunner().invoke(app, ["check", "--no-code", str(tmp_path)])
    assert (finished.exit_code, finished.stderr) == (0, "")
    finished = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert "RuntimeError: it was run (recipe.py:1 in <module>)" in str(finished.exception)


def test_schema_prints_the_schema_and_nothing_else() -> None:
    finished = CliRunner().invoke(app, ["schema"])
    assert finished.exit_code == 0
    assert json.loads(finished.stdout) == json_schema()


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"]])
def test_help_offers_nothing_but_the_commands_own_options(arguments: list[str]) -> None:
    finished = CliRunner().invoke(app, arguments)
    assert finished.exit_code == 0
    assert "completion" not in finished.stdout
