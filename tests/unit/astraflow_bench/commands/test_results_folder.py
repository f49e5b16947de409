"""`--write FOLDER` of the benchmarks: refused or made before the measurement, never after it."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from astraflow_bench.commands import bench_policies
from astraflow_bench.commands.results_folder import made


def test_a_missing_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    assert made(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_written_ends_the_command_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench_policies.measurement, "measure", lambda *_, **__: pytest.fail("it measured"))
    app = typer.Typer()
    app.command()(bench_policies.policies)

    result = CliRunner().invoke(app, ["--write", str(tmp_path / "file")])

    assert result.exit_code == 2
    assert "File exists" in result.output
