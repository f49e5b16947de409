"""Editors complete and check recipes by the schema in docs/; it is what the settings say now."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from astraflow.recipe.command import app
from support.source_tree import REPOSITORY

SCHEMA = REPOSITORY / "docs" / "recipe.schema.json"
RECIPES = sorted((REPOSITORY / "recipes").glob("*/recipe.yaml"))


def test_the_published_schema_is_fresh() -> None:
    assert SCHEMA.read_text() == CliRunner().invoke(app, ["schema"]).stdout, "run `make schema` and commit it"


def test_every_section_refuses_keys_it_does_not_know() -> None:
    schema = json.loads(SCHEMA.read_text())
    open_sections = [
        name
        for name, section in {"Recipe": schema, **schema["$defs"]}.items()
        if "properties" in section and section.get("additionalProperties") is not False
    ]
    assert open_sections == []


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.parent.name for path in RECIPES])
def test_a_recipe_names_the_schema_to_its_readers_editor(recipe: Path) -> None:
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", recipe.read_text())
    assert named
    assert (recipe.parent / named[1]).resolve() == SCHEMA
