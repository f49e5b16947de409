"""`astraflow doctor` tells findings to people and to programs, and its status says whether one failed."""

import json
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from astraflow_launcher.commands.doctor import app
from astraflow_launcher.support import checks
from astraflow_launcher.support.checks import Finding, State

GOOD = Finding("python", State.OK, "3.11.9")
DOUBTFUL = Finding("memory", State.WARNING, "2.0 GiB free", "close something")
BAD = Finding("packages", State.FAILED, "missing: grpc", "pip install 'astraflow[dev]'")


def _doctor(
    monkeypatch: pytest.MonkeyPatch, *findings: Finding, options: Sequence[str] = ()
) -> tuple[int, str]:
    monkeypatch.setattr(checks, "CHECKS", [lambda found=finding: found for finding in findings])
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(options))
    return result.exit_code, result.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(("findings", "status"), [((GOOD,), 0), ((GOOD, DOUBTFUL), 0), ((BAD, GOOD), 1)])
def test_only_a_failed_check_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, findings: tuple[Finding, ...], status: int, options: tuple[str, ...]
) -> None:
    assert _doctor(monkeypatch, *findings, options=options)[0] == status


def test_json_holds_every_finding_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = _doctor(monkeypatch, GOOD, DOUBTFUL, BAD, options=("--json",))
    assert json.loads(shown) == [
        {"check": "python", "state": "ok", "found": "3.11.9", "remedy": ""},
        {"check": "memory", "state": "warning", "found": "2.0 GiB free", "remedy": "close something"},
        {"check": "packages", "state": "failed", "found": "missing: grpc", "remedy": BAD.remedy},
    ]


def test_the_table_shows_every_word_of_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = _doctor(monkeypatch, GOOD, BAD)
    good, bad = shown.splitlines()[1:3]
    assert good.split() == ["python", "ok", "3.11.9"]
    for text in (BAD.check, BAD.state.value, BAD.found, BAD.remedy):
        assert text in bad
