"""The values of the charts: all described, nothing else taken, and what a newcomer sees agrees with it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from astraflow import __version__
from support.charts import CHARTS, EXAMPLES

NAMES = ("astraflow", "astraflow-pool")


def schema_of(chart: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHARTS / chart / "values.schema.json").read_text())
    return found


def values_of(chart: str) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load((CHARTS / chart / "values.yaml").read_text())
    return found


def parts(schema: dict[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value that a schema knows, by its path."""
    yield name, schema
    for key, child in schema.get("properties", {}).items():
        yield from parts(child, f"{name}.{key}")


@pytest.mark.parametrize("chart", NAMES)
def test_every_value_is_described_and_no_other_is_taken(chart: str) -> None:
    known = list(parts(schema_of(chart)))
    assert [name for name, part in known if len(part.get("description", "")) < 6] == []
    closed = [
        name for name, part in known if "properties" in part and part["additionalProperties"] is not False
    ]
    assert closed == []


@pytest.mark.parametrize("chart", NAMES)
def test_defaults_and_schema_have_the_same_values(chart: str) -> None:
    def paths(values: dict[str, Any], schema: dict[str, Any], name: str = "") -> Iterator[str]:
        for key, child in schema["properties"].items():
            yield f"{name}.{key}"
            if "properties" in child and key not in ("digests", "global"):
                yield from paths(values[key], child, f"{name}.{key}")
        assert set(values) <= set(schema["properties"]), name

    schema = schema_of(chart)
    described = set(paths(values_of(chart), schema))
    assert len(described) > 40


@pytest.mark.parametrize("chart", NAMES)
def test_a_chart_installs_the_release_it_comes_with(chart: str) -> None:
    about = YAML(typ="safe").load((CHARTS / chart / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (__version__, __version__)


def test_the_examples_say_what_they_are() -> None:
    examples = sorted(EXAMPLES.glob("*.yaml"))
    assert len(examples) >= 4
    assert [path.name for path in examples if not path.read_text().startswith("# Chart astraflow")] == []
