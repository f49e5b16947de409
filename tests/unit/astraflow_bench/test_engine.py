"""The benchmark runs and reports every engine it compares."""

import json
from pathlib import Path

from typer.testing import CliRunner

from astraflow_bench.engine import app
from support.tiny_models import save_tiny_model


def test_it_prints_a_line_per_engine_with_its_multiple(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    sizes = "--num-prompts 2 --group-size 2 --num-new-tokens 3 --slots 4 --repeats 1"
    result = CliRunner().invoke(app, ["--model-path", str(folder), *sizes.split()])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [line["engine"] for line in lines] == ["transformers", "engine, 4 slots"]
    assert lines[0]["times_transformers"] == 1.0
    assert all(line["tokens_per_cpu_s"] > 0 and line["sequences"] == 4 for line in lines)
